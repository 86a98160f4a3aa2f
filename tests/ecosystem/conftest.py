"""Libraries that people train with, in processes that have them already; nothing is downloaded."""

import importlib.util
import sys
from pathlib import Path

import forks
import pytest

import processes

sys.path.insert(0, str(Path(__file__).parent))
pytest.register_assert_rewrite("commands")

# Imported once, by the process of which those that train are copies.
OF_TORCH = (
    *("datasets", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2"),
    *("transformers.models.bert.modeling_bert", "transformers.models.t5.modeling_t5"),
    *("accelerate", "peft", "trl.trainer.sft_trainer", "sentence_transformers.trainer", "sentence_transformers.losses"),
    *("diffusers.models.unets.unet_2d", "diffusers.training_utils", "lightning", "pytorch_lightning", "torchmetrics"),
    *("torch_geometric.nn", "torchao.optim", "torchao.quantization.qat", "bitsandbytes"),
)
# Where torchvision is, it cannot be imported before a script has said how.
LIBRARIES = {"torch": () if importlib.util.find_spec("torchvision") else OF_TORCH, "jax": ("equinox", "diffrax")}
for framework, modules in LIBRARIES.items():
    forks.FRAMEWORKS[framework] = (*forks.FRAMEWORKS[framework], *modules)
processes.QUIET.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1")


def pytest_generate_tests(metafunc):
    if "script" in metafunc.fixturenames:
        metafunc.parametrize("script", metafunc.cls.scripts)
