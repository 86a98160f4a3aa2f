"""`install()`: what scripts import, and what is left of it after `uninstall()`. Each case runs in its own Python."""

import os
import subprocess
import sys
import textwrap

import pytest

from ampx.errors import InvalidOptionError
from processes import run_python

STAMP = "STAMP = {!r}\n"


@pytest.fixture
def python(tmp_path):
    """Run lines of Python where the packages in `files` can be imported; gives what they print."""

    def run(code, files=None):
        for name, text in (files or {}).items():
            path = tmp_path / "site" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        paths = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
        return run_python("-W", "error", "-c", textwrap.dedent(code), check=True, PYTHONPATH=paths).stdout.strip()

    return run


OLD = {  # an apex as it was: with amp
    "apex/__init__.py": STAMP.format("real"),
    "apex/amp/__init__.py": STAMP.format("real amp"),
    "apex/contrib.py": STAMP.format("real contrib"),
    "amp_C.py": STAMP.format("real amp_C"),
}
NEW = {  # an apex as it is since 2025: without amp
    "apex/__init__.py": STAMP.format("real"),
    "apex/optimizers/__init__.py": STAMP.format("real optimizers"),
    "apex/contrib.py": STAMP.format("real contrib"),
    "amp_C.py": STAMP.format("real amp_C"),
}
INSTALL = "import ampx_torch.apex; ampx_torch.apex.install()\n"


def test_importing_the_package_imports_no_framework(python):
    assert python("import sys, ampx_torch.apex; print('torch' in sys.modules, 'apex' in sys.modules)") == "False False"


def test_the_imports_that_scripts_make_work(python):
    lines = """
    import apex
    from apex import amp
    from apex import optimizers, parallel, normalization, fp16_utils
    import apex.amp as again
    from apex.amp import _amp_state
    from apex.fp16_utils import *
    from apex.fp16_utils.loss_scaler import DynamicLossScaler as Scaler
    from apex.multi_tensor_apply import multi_tensor_applier
    from apex.normalization.fused_layer_norm import FusedLayerNorm as Norm
    from apex.optimizers import FusedAdam, FusedLAMB, FusedSGD, FusedNovoGrad, FusedAdagrad
    from apex.optimizers.fused_adam import FusedAdam as Adam
    from apex.parallel import DistributedDataParallel as DDP, SyncBatchNorm, convert_syncbn_model, LARC, Reducer
    from apex.parallel.LARC import LARC as Larc
    from apex.parallel.distributed import DistributedDataParallel
    import amp_C, apex_C
    """
    names = """
    assert apex.amp is amp is again
    assert amp.initialize and amp.scale_loss and amp.master_params
    assert apex.parallel.DistributedDataParallel is DDP is DistributedDataParallel
    assert Adam is FusedAdam and Larc is LARC and Scaler is DynamicLossScaler
    assert apex.optimizers.FusedLAMB is FusedLAMB
    assert multi_tensor_applier(amp_C.multi_tensor_l2norm, None, [[__import__('torch').ones(4)]])[0].item() == 2
    network_to_half, FP16_Optimizer, apex_C.flatten
    print("imported")
    """
    assert python(INSTALL + textwrap.dedent(lines) + textwrap.dedent(names)) == "imported"


def test_there_is_one_module_under_both_names(python):
    code = "import sys, apex.parallel.larc, ampx_torch.apex.parallel as ours\n"
    code += "print(apex.parallel is ours, all(sys.modules[name] is not None for name in list(sys.modules)),\n"
    code += "len({id(one) for name, one in sys.modules.items() if name.endswith('apex.parallel.distributed')}))"
    assert python(INSTALL + code) == "True True 1"


def test_the_published_and_the_former_path_give_the_same_modules(python):
    code = """
    import pickle, ampx_torch.apex
    from ampx_torch.apex import amp
    from ampx_torch.apex.amp._amp_state import _amp_state
    import ampx_torch.apex.parallel.distributed as published
    import ampx_apex.apex
    import ampx_apex.apex.parallel.distributed as own
    print(published is own, amp is ampx_apex.apex.amp, amp._amp_state is _amp_state)
    print(pickle.loads(b'campx_torch.apex.fp16_utils.loss_scaler\\nLossScaler\\n.').__module__)
    """
    assert python(code) == "True True True\nampx_apex.apex.fp16_utils.loss_scaler"
    former = (
        "import pickle; print(pickle.loads(b'campx_torch.old.apex.fp16_utils.loss_scaler\\nLossScaler\\n.').__module__)"
    )
    assert python(former) == "ampx_apex.apex.fp16_utils.loss_scaler"


def test_what_is_plain_torch_under_an_old_name_is_found_in_all_ways_of_importing(python):
    code = """
    import apex
    import apex.amp.utils, apex.mlp, apex.fused_dense, apex.contrib.xentropy, apex.amp.lists.torch_overrides
    import apex.contrib.layer_norm.layer_norm as norms
    from apex import amp, contrib, fused_dense, mlp
    from apex._autocast_utils import _cast_if_autocast_enabled
    from apex.amp import __version__, lists
    from apex.amp._amp_state import maybe_print
    from apex.amp.compat import filter_attrs, is_floating_point, is_tensor_like
    from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides
    from apex.amp.rnn_compat import has_old_rnns
    from apex.amp.utils import is_fp_tensor
    from apex.contrib import xentropy
    from apex.contrib.clip_grad import clip_grad_norm_
    from apex.contrib.layer_norm import FastLayerNorm
    from apex.contrib.layer_norm.layer_norm import FastLayerNormFN
    from apex.contrib.optimizers import FP16_Optimizer, FusedAdam, FusedLAMB
    from apex.contrib.optimizers.fp16_optimizer import FP16_Optimizer as Same
    from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
    from apex.contrib.xentropy.softmax_xentropy import SoftmaxCrossEntropyLoss as Loss
    from apex.fused_dense import FusedDense, FusedDenseGeluDense
    from apex.fused_dense.fused_dense import DenseNoBiasFunc, FusedDenseFunc
    from apex.mlp import MLP
    from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction, manual_rms_norm
    from apex.optimizers import FP16_Optimizer as Early, FusedMixedPrecisionLamb
    from apex.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb as Lamb
    from apex.parallel import ReduceOp
    from apex.parallel.distributed import apply_flat_dist_call, flat_dist_call, split_half_float_double
    from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm
    import torch
    assert apex.contrib.xentropy.SoftmaxCrossEntropyLoss is xentropy.SoftmaxCrossEntropyLoss is Loss
    assert apex.mlp.MLP is MLP and apex.fused_dense.FusedDense is FusedDense and norms.FastLayerNorm is FastLayerNorm
    assert apex.amp.lists.torch_overrides is torch_overrides and torch_overrides.MODULE is torch
    assert Early is FP16_Optimizer is Same and Lamb is FusedMixedPrecisionLamb
    assert apex.amp.utils.is_fp_tensor([torch.ones(1)]) and not is_fp_tensor(torch.ones(1, dtype=torch.int))
    assert filter_attrs(torch, ["mm", "nothing"]) == ["mm"]
    assert not has_old_rnns() and __version__.__version__ and is_tensor_like(torch.ones(1))
    assert _cast_if_autocast_enabled(torch.ones(1)) == (torch.ones(1),)
    print("imported")
    """
    assert python(INSTALL + textwrap.dedent(code)) == "imported"


MISSING = {
    "import apex.transformer": ("apex.transformer", "megatron.core"),
    "from apex.transformer.pipeline_parallel.utils import f": ("apex.transformer", "megatron.core"),
    "from apex import RNN": ("apex.RNN", "torch.nn.LSTM"),
    "from apex.contrib import sparsity": ("apex.contrib.sparsity", "torch.nn.utils.prune"),
    "from apex.contrib.multihead_attn import Self": ("apex.contrib.multihead_attn", "torch.nn.MultiheadAttention"),
    "from apex.contrib.optimizers.distributed_fused_adam import X": ("distributed_fused_adam", "ZeroRedundancy"),
    "from apex.reparameterization import apply_weight_norm": ("apex.reparameterization", "weight_norm"),
    "from apex.amp import wrap": ("apex.amp.wrap", "register_half_function"),
    "from apex.optimizers import FusedNothing": ("apex.optimizers.FusedNothing", "install NVIDIA apex"),
}


def test_what_is_not_provided_says_so_and_what_to_use(python):
    """Libraries that can do without catch `ImportError`, or `ModuleNotFoundError`."""
    code = f"""
    for statement in {list(MISSING)}:
        try:
            exec(statement)
        except ModuleNotFoundError as error:
            print(isinstance(error, ampx_torch.apex.ApexPartMissingError), error)
    """
    lines = python(INSTALL + textwrap.dedent(code)).splitlines()
    assert len(lines) == len(MISSING)
    for line, (name, advice) in zip(lines, MISSING.values(), strict=True):
        assert line.startswith("True apex.")
        assert f"{name} was imported" in line or f"{name}." in line
        assert "provided: apex.amp" in line
        assert advice in line


def test_libraries_that_ask_for_the_installed_version_find_one(python):
    code = """
    import importlib.metadata, importlib.util
    print(importlib.util.find_spec("apex") is not None, importlib.metadata.version("apex"))
    print([one.name for one in importlib.metadata.distributions(name="apex")])
    print(len(importlib.metadata.entry_points()) > 0)
    ampx_torch.apex.uninstall()
    try:
        importlib.metadata.version("apex")
    except importlib.metadata.PackageNotFoundError:
        print("gone")
    """
    assert python(INSTALL + textwrap.dedent(code)).splitlines() == ["True 0.1", "['apex']", "True", "gone"]


def test_names_that_were_bound_are_gone_after_uninstall(python):
    code = """
    import sys, ampx_torch.apex.contrib as ours
    before = hasattr(ours, "xentropy"), any("LastFinder" in repr(finder) for finder in sys.meta_path)
    ampx_torch.apex.uninstall()
    print(before, hasattr(ours, "xentropy"), any("LastFinder" in repr(finder) for finder in sys.meta_path))
    """
    assert python(INSTALL + textwrap.dedent(code)) == "(True, True) False False"


def test_the_launcher_starts_a_process_for_each_rank(tmp_path):
    pytest.importorskip("typer", reason="needs typer, of the extra cli")
    script = tmp_path / "train.py"
    script.write_text(
        "import argparse, torch, torch.distributed as dist\n"
        "from apex.parallel.distributed import flat_dist_call\n"
        "parser = argparse.ArgumentParser()\n"
        "for name in ('--rank', '--world-size'):\n"
        "    parser.add_argument(name, type=int)\n"
        "args = parser.parse_args()\n"
        "store = dist.FileStore('store', args.world_size)\n"
        "dist.init_process_group('gloo', store=store, rank=args.rank, world_size=args.world_size)\n"
        "sums = torch.tensor([float(args.rank)])\n"
        "flat_dist_call([sums], dist.all_reduce)\n"
        "print(args.rank, sums.item())\n"
    )
    command = ("-m", "ampx_torch.apex.parallel.multiproc", "train.py", "--world-size", "2")
    done = run_python(*command, cwd=tmp_path, check=True, GLOO_SOCKET_IFNAME="lo")
    assert done.stdout == "0 0.5\n"
    assert (tmp_path / "GPU_1.log").read_text() == "1 0.5\n"


def test_the_launcher_ends_the_others_when_one_process_fails(monkeypatch, tmp_path):
    from ampx_torch.apex.parallel import multiproc

    work = "import sys, time; sys.exit(7) if sys.argv[-1] == '1' else time.sleep(300)"
    popen, started = subprocess.Popen, []

    def start(command, stdout):
        assert command[:5] == [sys.executable, "-m", "ampx", "run", "train.py"]
        started.append(popen([sys.executable, "-c", work, *command], stdout=stdout))
        return started[-1]

    monkeypatch.setattr(multiproc.subprocess, "Popen", start)
    monkeypatch.chdir(tmp_path)
    assert multiproc.main(["train.py", "--world-size", "3"]) == 7
    assert all(process.returncode is not None for process in started)
    monkeypatch.setattr(multiproc.torch.cuda, "device_count", lambda: 0)
    with pytest.raises(InvalidOptionError, match="--world-size N among them where there is no GPU"):
        multiproc.main(["train.py"])
    with pytest.raises(InvalidOptionError, match="got nothing"):
        multiproc.main([])


def test_it_may_be_called_again(python):
    code = (
        INSTALL + "import apex\nampx_torch.apex.install()\nampx_torch.apex.install(force=True)\nimport apex as again\n"
    )
    assert python(code + "print(apex is again)\nampx_torch.apex.uninstall()\nampx_torch.apex.uninstall()") == "True"


def test_uninstall_leaves_no_name(python):
    code = """
    import sys, ampx_torch.apex
    ampx_torch.apex.install()
    from apex import amp
    ampx_torch.apex.uninstall()
    old = [name for name in sys.modules if name.split('.')[0] in ('apex', 'amp_C', 'apex_C')]
    try:
        import apex
    except ModuleNotFoundError as error:
        print(old, error.name)
    """
    assert python(code) == "[] apex"


def test_an_apex_that_has_amp_is_not_replaced_unasked(python):
    code = """
    import sys, ampx_torch.apex
    try:
        ampx_torch.apex.install()
    except ampx_torch.apex.ApexPresentError as error:
        print(isinstance(error, __import__('ampx').AmpxError), error)
    print('apex' in sys.modules)
    import apex.amp
    print(apex.amp.STAMP)
    """
    message, untouched, stamp = python(code, OLD).splitlines()
    assert message.startswith("True install() found an apex that has amp")
    assert "accepted: an environment without apex" in message
    assert "force=True" in message
    assert (untouched, stamp) == ("False", "real amp")


@pytest.mark.parametrize("imported", [True, False])
def test_an_apex_that_has_amp_is_replaced_when_asked_and_comes_back(python, imported):
    code = f"""
    import sys, ampx_torch.apex
    if {imported}:
        import apex.amp, apex.contrib, amp_C
        before = [apex, apex.amp, apex.contrib, amp_C]
    ampx_torch.apex.install(force=True)
    from apex import amp
    import amp_C
    print(hasattr(amp, 'STAMP'), hasattr(amp_C, 'STAMP'), hasattr(sys.modules['apex.contrib'], 'STAMP'))
    ampx_torch.apex.uninstall()
    import apex.amp, apex.contrib, amp_C
    after = [apex, apex.amp, apex.contrib, amp_C]
    print([one.STAMP for one in after])
    print(all(one is other for one, other in zip(before if {imported} else after, after)))
    """
    replaced, stamps, same = python(code, OLD).splitlines()
    assert replaced == "False False False"
    assert stamps == "['real', 'real amp', 'real contrib', 'real amp_C']"
    assert same == "True"


def test_an_apex_without_amp_gets_what_it_misses_and_keeps_what_it_has(python):
    code = """
    import sys, ampx_torch.apex
    ampx_torch.apex.install()
    import apex, amp_C
    from apex import amp, parallel
    from apex.fp16_utils import FP16_Optimizer
    import apex.optimizers, apex.contrib, apex.parallel.LARC
    print(apex.STAMP, apex.optimizers.STAMP, apex.contrib.STAMP, amp_C.STAMP)
    print(amp is ampx_torch.apex.amp is apex.amp, parallel is ampx_torch.apex.parallel is apex.parallel)
    ampx_torch.apex.uninstall()
    print(apex is sys.modules['apex'], hasattr(apex, 'amp'), hasattr(apex, 'optimizers'), 'apex.amp' in sys.modules)
    try:
        from apex import amp
    except ImportError as error:
        print(error.name)
    """
    assert python(code, NEW).splitlines() == [
        "real real optimizers real contrib real amp_C",
        "True True",
        "True False True False",
        "apex",
    ]


def test_an_apex_that_was_completed_is_replaced_when_asked(python):
    code = """
    import apex, ampx_torch.apex
    real = apex
    ampx_torch.apex.install()
    ampx_torch.apex.install(force=True)
    import apex
    print(hasattr(apex, 'STAMP'), hasattr(real, 'amp'))
    ampx_torch.apex.uninstall()
    import apex
    print(apex is real)
    """
    assert python(code, NEW).splitlines() == ["False False", "True"]


def test_a_broken_apex_without_amp_is_told(python):
    code = """
    import sys, ampx_torch.apex
    try:
        ampx_torch.apex.install()
    except ampx_torch.apex.ApexPresentError as error:
        print(error, '/', repr(error.__cause__))
    print([name for name in sys.modules if name.startswith('apex')])
    ampx_torch.apex.install(force=True)
    from apex import amp
    """
    message, left = python(code, {"apex/__init__.py": "import no_such_extension\n"}).splitlines()
    assert "fails to import: No module named 'no_such_extension'; accepted: " in message
    assert "ModuleNotFoundError" in message
    assert left == "[]"


def test_a_package_of_that_name_that_is_another_project_is_completed_too(python):
    code = (
        INSTALL + "from apex import amp, parallel, optimizers\nimport apex\nprint(apex.STAMP, amp.initialize.__name__)"
    )
    assert python(code, {"apex/__init__.py": STAMP.format("a web toolkit")}) == "a web toolkit initialize"


def test_an_object_pickled_by_apex_is_found(python):
    code = INSTALL + "import pickle\n"
    code += "print(pickle.loads(b'capex.fp16_utils.loss_scaler\\nDynamicLossScaler\\n.').__name__)"
    assert python(code) == "DynamicLossScaler"
