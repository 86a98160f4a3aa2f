"""What a script does in PyTorch's own mixed precision, without ampx: evidence of `scripts/torch/truth.toml`.

    python tests/corpus/native_torch.py float16 tests/corpus/scripts/torch/pixel_norm.py@4

prints, for the script and for its twin, losses in float32 and in the dtype, the first operations that are not finite
with the module that was running, and the modules whose outputs, and the parameters whose gradients, are farthest from
float32's in the first step.
`SCRIPT@NAME,NAME` also keeps these modules in float32.
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import pickle
import runpy
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a copy of a process has none of its threads

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from corpus import imported, options_of

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def floats(tree):
    if isinstance(tree, torch.Tensor):
        return [tree] if tree.is_floating_point() else []
    if isinstance(tree, dict):
        tree = list(tree.values())
    return [leaf for value in tree for leaf in floats(value)] if isinstance(tree, (list, tuple)) else []


def mapped(function, tree):
    if isinstance(tree, torch.Tensor):
        return function(tree) if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {key: mapped(function, value) for key, value in tree.items()}
    return type(tree)([mapped(function, value) for value in tree]) if type(tree) in (list, tuple) else tree


class Operations(TorchDispatchMode):
    """Notes the first operations that make inf or NaN of finite numbers."""

    def __init__(self, watch):
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = str(function)
        if "empty" not in name and len(self.watch.broken) < 4:
            bad = [x for x in floats(result) if x.device.type == "cpu" and x.numel() and not x.isfinite().all()]
            if bad and all(x.isfinite().all() for x in floats(list(args))):
                self.watch.note(name.removeprefix("aten."), bad[0])
        return result


class Watch:
    """Modules by name, those kept in float32, what each computed in the first step, and the steps."""

    def __init__(self, kept, scale):
        self.kept, self.scale = kept, scale
        self.names, self.stack, self.outputs, self.broken = {}, [], [], []
        self.step, self.backward, self.skipped, self.roots = 1, False, [], 0
        self.gradients = []

    def note(self, operation, value):
        where = self.names.get(self.stack[-1], "?") if self.stack else ""
        self.broken.append(
            (self.step, "backward" if self.backward else "forward", where, operation, str(value.dtype)[6:])
        )

    def call(self, original):
        def __call__(module, *args, **kwargs):  # noqa: N807
            if module not in self.names:
                self.roots += not self.stack
                for name, child in module.named_modules():
                    self.names.setdefault(child, name)
            self.stack.append(module)
            try:
                if self.names[module] in self.kept:
                    with torch.autocast("cpu", enabled=False):
                        args, kwargs = mapped(torch.Tensor.float, args), mapped(torch.Tensor.float, kwargs)
                        result = original(module, *args, **kwargs)
                else:
                    result = original(module, *args, **kwargs)
            finally:
                self.stack.pop()
            if self.step == 1 and len(self.outputs) < 400:
                values = [x.detach().float().flatten() for x in floats(result)]
                self.outputs.append((self.names[module], torch.cat(values).clone() if values else torch.empty(0)))
            return result

        return __call__

    def backward_of(self, original):
        def backward(loss, *args, **kwargs):
            leaves, seen, todo = [], set(), [loss.grad_fn]
            while todo:
                node = todo.pop()
                if node is None or node in seen:
                    continue
                seen.add(node)
                if hasattr(node, "variable"):
                    leaves.append(node.variable)
                todo += [child for child, _ in node.next_functions]
            before = [leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
            scale, self.backward = self.scale, True
            with torch.autocast("cpu", enabled=False):
                original(loss * scale, *args, **kwargs)
            self.backward = False
            for leaf, old in zip(leaves, before, strict=True):
                if leaf.grad is not None:
                    leaf.grad = leaf.grad / scale if old is None else leaf.grad / scale + old

        return backward

    def before_step(self, optimizer, *_):
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if self.step == 1:
            own = {module: module.named_parameters(self.names[module], recurse=False) for module in self.names}
            names = {parameter: name for pairs in own.values() for name, parameter in pairs}
            self.gradients += [(names.get(p, "?"), p.grad.float().flatten().clone()) for p in parameters]
        if not all(p.grad.isfinite().all() for p in parameters):
            self.skipped.append(self.step)
            self.scale = max(1.0, self.scale / 4)
            for parameter in parameters:
                parameter.grad = None

    def after_step(self, *_):
        self.step += 1


def run(script, options, dtype, kept, scale):
    """Run the script; return losses, what was not finite, outputs of the first step, skipped steps, what was raised."""
    watch = Watch(kept, scale if dtype else 1.0)
    nn.Module.__call__ = watch.call(nn.Module.__call__)
    torch.Tensor.backward = watch.backward_of(torch.Tensor.backward)
    register_optimizer_step_pre_hook(watch.before_step)
    register_optimizer_step_post_hook(watch.after_step)
    sys.argv = [script, *options]
    printed, raised = io.StringIO(), None
    casting = torch.autocast("cpu", DTYPES[dtype], cache_enabled=False) if dtype else contextlib.nullcontext()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings(), casting, Operations(watch):
        warnings.simplefilter("ignore")
        try:
            runpy.run_path(script, run_name="__main__")
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            place = [frame for frame in frames if frame.filename == script][-1:]
            where = watch.names.get(watch.stack[-1], "?") if watch.stack else ""
            raised = f"{type(error).__name__}: {str(error)[:150]} (line {place[0].lineno if place else '?'}, {where!r})"
    lines = printed.getvalue().splitlines()
    losses = json.loads(lines[-1]) if lines and raised is None else []
    return {
        "losses": losses,
        "broken": watch.broken,
        "outputs": watch.outputs,
        "gradients": watch.gradients,
        "skipped": watch.skipped,
        "raised": raised,
    }


def forked(*arguments):
    with tempfile.NamedTemporaryFile() as file:
        child = os.fork()
        if child == 0:
            try:
                file.write(pickle.dumps(run(*arguments)))
                file.flush()
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        os.waitpid(child, 0)
        with open(file.name, "rb") as answer:
            return pickle.load(answer)


def difference(losses, reference):
    if len(losses) != len(reference) or not losses:
        return float("nan")
    losses, reference = torch.tensor(losses), torch.tensor(reference)
    return ((losses - reference).abs().max() / reference.abs().max()).item()


def worst(outputs, reference):
    rows = []
    for (name, value), (other, exact) in zip(outputs, reference, strict=False):
        if name == other and value.shape == exact.shape and value.numel():
            error = ((value - exact).norm() / exact.norm().clamp(min=1e-30)).item()
            rows.append((round(error, 5), name))
    return rows


def short(losses):
    return " ".join(f"{loss:.4g}" for loss in losses)


def look(arguments, options):
    exact = forked(arguments.script, options, None, [], 1.0)
    low = forked(arguments.script, options, arguments.dtype, [], arguments.scale)
    print("   float32: ", short(exact["losses"]), exact["skipped"], exact["raised"] or "", exact["broken"][:2])
    print("   low:     ", short(low["losses"]), low["skipped"], low["raised"] or "")
    print(f"   difference {difference(low['losses'], exact['losses']):.3g}")
    for row in low["broken"]:
        print("      not finite:", row)
    rows = worst(low["outputs"], exact["outputs"])
    first = next((row for row in rows if row[0] > arguments.error), None)
    print("      first module off by more than", arguments.error, first, "worst", sorted(rows, key=lambda r: -r[0])[:3])
    joined = ([("all", torch.cat([value for _, value in run["gradients"]])), *run["gradients"]] for run in (low, exact))
    together, *rows = worst(*joined) if low["gradients"] and exact["gradients"] else [()]
    print("      gradients", *together, "worst", sorted(rows, key=lambda r: -r[0])[:3])
    if arguments.float32:
        kept = forked(arguments.script, options, arguments.dtype, arguments.float32, arguments.scale)
        print("   kept:    ", short(kept["losses"]), kept["skipped"], kept["raised"] or "", kept["broken"][:2])
        print(f"   difference {difference(kept['losses'], exact['losses']):.3g}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dtype")
    parser.add_argument("scripts", nargs="+")
    parser.add_argument("--scale", type=float, default=1024.0)
    parser.add_argument("--error", type=float, default=0.1)
    arguments = parser.parse_args()
    for named in arguments.scripts:
        script, _, kept = named.partition("@")
        arguments.script, arguments.float32 = script, kept.split(",") if kept else []
        print("==", os.path.basename(script), arguments.dtype)
        for name in imported([Path(script)]):  # here, so that copies of this process have it
            importlib.import_module(name)
        for options in options_of(script):
            look(arguments, options)


if __name__ == "__main__":
    main()
