"""`install()`: what scripts import, and what is left of it after `uninstall()`. Each case runs in its own Python."""

import os
import subprocess
import sys
import textwrap

import pytest

STAMP = "STAMP = {!r}\n"


@pytest.fixture
def python(tmp_path):
    """Run lines of Python where the packages in `files` can be imported; gives what they print."""

    def run(code, files=None):
        for name, text in (files or {}).items():
            path = tmp_path / "site" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

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


def test_what_apex_has_and_this_has_not_is_missing_in_the_usual_way(python):
    code = "try:\n    import apex.contrib.xentropy\nexcept ModuleNotFoundError as error:\n    print(error.name)"
    assert python(INSTALL + code) == "apex.contrib"


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
    told, untouched, stamp = python(code, OLD).splitlines()
    assert told.startswith("True install() found an apex that has amp")
    assert "accepted: an environment without apex" in told
    assert "force=True" in told
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
    print(hasattr(amp, 'STAMP'), hasattr(amp_C, 'STAMP'), 'apex.contrib' in sys.modules)
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
    told, left = python(code, {"apex/__init__.py": "import no_such_extension\n"}).splitlines()
    assert "fails to import: No module named 'no_such_extension'; accepted: " in told
    assert "ModuleNotFoundError" in told
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
