"""The trainers of other libraries: imported once, with the warnings that they send; ours are errors."""

import logging
import os
import pathlib
import sys
import warnings

import pytest

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE / "scripts"))  # scripts of which nobody imports anything but `main`

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch

    pytest.importorskip("lightning", reason="Lightning is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    from accelerate.state import AcceleratorState, GradientState, PartialState

import ampx  # noqa: E402
import simulated_cuda  # noqa: E402

logging.getLogger("lightning").setLevel(logging.ERROR)


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("error::ampx.errors.AmpxWarning"), append=False)
            item.add_marker(pytest.mark.filterwarnings("ignore:dtype='b?float16'. asked for"))
            item.add_marker(pytest.mark.filterwarnings("ignore"), append=False)


@pytest.fixture(autouse=True)
def _alone():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ampx.shutdown()
    yield
    ampx.shutdown()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


@pytest.fixture(scope="session")
def simulated_cuda_folder(tmp_path_factory):
    """Where the simulated CUDA device is, which a process starts by `simulated_cuda.start(folder)`."""
    folder = pathlib.Path(os.environ.get("TOX_ENV_DIR") or tmp_path_factory.getbasetemp().parent) / "simulated-cuda"
    try:
        simulated_cuda.build(pathlib.Path(torch.__file__).parent, folder)
    except simulated_cuda.CannotSimulateError as error:
        pytest.skip(str(error))
    return folder


@pytest.fixture
def amp():
    """A session in float16 that casts in the trainers' regions only."""
    scale = ampx.LossScale(init_scale=1024.0, growth_interval=2)
    return ampx.init("torch", dtype="float16", device="cpu", process_wide=False, loss_scale=scale, nan_loss="skip")
