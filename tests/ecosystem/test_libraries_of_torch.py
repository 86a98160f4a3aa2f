"""Libraries that people train PyTorch with."""

from typing import ClassVar

import pytest
from commands import EveryCommand

from processes import run_python

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers, and with it the other libraries, is not installed")


class TestLibraries(EveryCommand):
    framework = "torch"
    # Activations are rounded to 8 bits with a sign: what float16 changes may move one by a step. Its losses are, to the
    # bit, those of PyTorch's own autocast with a GradScaler.
    coarse: ClassVar = {"torchao_quantized_aware": 2.0**-7}
    scripts = (
        "accelerate_loop",
        "bitsandbytes_optimizer",
        "diffusers_unet",
        "lightning_trainer",
        "peft_lora",
        "pytorch_lightning_trainer",
        "sentence_transformers_trainer",
        "torch_geometric_gcn",
        "torchao_optimizer",
        "torchao_quantized_aware",
        "torchmetrics_loop",
        "transformers_by_hand",
        "transformers_trainer",
        "trl_sft",
    )


def test_all_of_them_are_imported_as_in_plain_python(tmp_path):
    """In a new process, where ampx sees what they look for while they are imported."""
    names = sorted({name.partition("_")[0] for name in TestLibraries.scripts} - {"pytorch", "sentence", "torch"})
    script = tmp_path / "train.py"
    script.write_text(
        f"import {', '.join([*names, 'pytorch_lightning', 'sentence_transformers', 'torch_geometric'])}, sys\n"
        "print(sorted(name for name in sys.modules if name.partition('.')[0] not in ('ampx', 'ampx_torch')))\n"
    )
    done = run_python("-m", "ampx", "run", script, fresh=True, check=True)
    assert "'transformers'" in done.stdout
    assert "'apex'" not in done.stdout
