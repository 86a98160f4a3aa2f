"""Trains a small residual network on scikit-learn's digits, in the manner of an ImageNet example with Apex."""

import argparse
import json
import time

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.functional import max_pool2d, relu

try:
    from apex import amp
    from apex.fp16_utils import to_python_float
    from apex.parallel import DistributedDataParallel, convert_syncbn_model
except ImportError as error:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.") from error


def parse():
    parser = argparse.ArgumentParser(description="Digits training")
    parser.add_argument("--epochs", default=4, type=int, metavar="N", help="number of total epochs to run")
    parser.add_argument("-b", "--batch-size", default=64, type=int, metavar="N", help="mini-batch size per process")
    parser.add_argument("--lr", "--learning-rate", default=0.05, type=float, metavar="LR")
    parser.add_argument("--momentum", default=0.9, type=float, metavar="M", help="momentum")
    parser.add_argument("--weight-decay", "--wd", default=1e-4, type=float, metavar="W")
    parser.add_argument("--print-freq", "-p", default=10, type=int, metavar="N", help="print frequency")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--local_rank", default=0, type=int)
    parser.add_argument("--distributed", action="store_true")
    parser.add_argument("--sync_bn", action="store_true", help="enabling apex sync BN.")
    parser.add_argument("--opt-level", type=str, default="O1")
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    return parser.parse_args()


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x):
        out = relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return relu(out + x)


class SmallResNet(nn.Module):
    def __init__(self, channels=16, num_classes=10):
        super().__init__()
        self.conv = nn.Conv2d(1, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.block = Block(channels)
        self.fc = nn.Linear(channels * 4, num_classes)

    def forward(self, x):
        x = relu(self.bn(self.conv(x)))
        x = self.block(max_pool2d(x, 2))
        x = max_pool2d(x, 2)
        return self.fc(x.view(x.size(0), -1))


class AverageMeter:
    """Computes and stores the average and current value"""

    def __init__(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def accuracy(output, target):
    pred = output.data.max(1)[1]
    return pred.eq(target.data).float().mean() * 100.0


def adjust_learning_rate(optimizer, epoch, args):
    """LR schedule with warmup in the first epoch"""
    lr = args.lr * (0.5 if epoch < 1 else 1.0) * (0.1 ** (epoch // 3))
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


def train(images, labels, model, criterion, optimizer, epoch, args, history):
    batch_time, losses, top1 = AverageMeter(), AverageMeter(), AverageMeter()
    model.train()
    order = torch.randperm(len(images))
    end = time.time()
    for i in range(len(images) // args.batch_size):
        batch = order[i * args.batch_size : (i + 1) * args.batch_size]
        input, target = images[batch], labels[batch]

        output = model(input)
        loss = criterion(output, target)

        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

        history.append(to_python_float(loss.data))
        losses.update(history[-1], input.size(0))
        top1.update(to_python_float(accuracy(output, target)), input.size(0))
        batch_time.update(time.time() - end)
        end = time.time()
        if args.local_rank == 0 and i % args.print_freq == 0:
            print(
                f"Epoch: [{epoch}][{i}]\tTime {batch_time.val:.3f} ({batch_time.avg:.3f})\t"
                f"Loss {losses.val:.6f} ({losses.avg:.4f})\tPrec@1 {top1.val:.3f} ({top1.avg:.3f})"
            )


def validate(images, labels, model, criterion):
    model.eval()
    with torch.no_grad():
        output = model(images)
        loss = criterion(output, labels)
    prec1 = to_python_float(accuracy(output, labels))
    print(f" * Loss {to_python_float(loss):.4f} Prec@1 {prec1:.3f}")
    return prec1


def main():
    args = parse()
    print(f"opt_level = {args.opt_level}")
    print(f"keep_batchnorm_fp32 = {args.keep_batchnorm_fp32}", type(args.keep_batchnorm_fp32))
    print(f"loss_scale = {args.loss_scale}", type(args.loss_scale))
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.distributed:
        torch.distributed.init_process_group(backend="nccl" if device.type == "cuda" else "gloo", init_method="env://")

    data = load_digits()
    images = torch.from_numpy(data.images).float().unsqueeze(1).to(device) / 16.0
    labels = torch.from_numpy(data.target).long().to(device)
    shuffled = torch.from_numpy(np.random.permutation(len(images)))
    train_set, val_set = shuffled[:1437], shuffled[1437:]

    model = SmallResNet()
    if args.sync_bn:
        print("using apex synced BN")
        model = convert_syncbn_model(model)
    model = model.to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    if args.distributed:
        # delay_allreduce delays all communication to the end of the backward pass.
        model = DistributedDataParallel(model, delay_allreduce=True)

    history, prec1 = [], 0.0
    for epoch in range(args.epochs):
        adjust_learning_rate(optimizer, epoch, args)
        train(images[train_set], labels[train_set], model, criterion, optimizer, epoch, args, history)
        prec1 = validate(images[val_set], labels[val_set], model, criterion)
    if args.distributed:
        torch.distributed.destroy_process_group()
    print(json.dumps({"losses": history, "metric": prec1 / 100.0}))


if __name__ == "__main__":
    main()
