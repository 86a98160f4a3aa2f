"""Lets torchvision be imported beside PyTorch for CPUs where its own wheel is one for CUDA.

Its compiled operations cannot be loaded then, and it registers two that nobody has declared.
"""

import importlib.metadata

import torch

if torch.version.cuda is None and "+cpu" not in importlib.metadata.version("torchvision"):
    torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
