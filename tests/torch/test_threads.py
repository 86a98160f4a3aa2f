"""Casting in threads: torch keeps the switch by thread."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import ampx


@pytest.fixture(autouse=True)
def restored():
    yield
    ampx.shutdown()


def product_dtype():
    x = torch.ones(2, 2)
    return (x @ x).dtype


def in_thread(function):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(function()))
    thread.start()
    thread.join()
    return seen[0]


def test_native_autocast_is_off_in_new_threads():
    torch.set_autocast_enabled("cpu", True)
    try:
        assert in_thread(product_dtype) == torch.float32
    finally:
        torch.set_autocast_enabled("cpu", False)


def test_enter_thread_keeps_the_weight_cache_off():
    amp = ampx.init("torch", dtype="bfloat16", device="cpu")
    linear, x = nn.Linear(4, 4, bias=False), torch.ones(1, 4)

    def stale():
        amp.enter_thread()
        first = linear(x)
        linear.weight.data += 1
        return torch.equal(first, linear(x))

    assert not in_thread(stale)


def test_a_region_works_in_a_thread_that_did_not_enter():
    amp = ampx.init("torch", dtype="bfloat16", device="cpu")

    def both():
        with amp.autocast():
            inside = product_dtype()
        return inside, product_dtype()

    assert in_thread(both) == (torch.bfloat16, torch.float32)


def test_shutdown_in_the_main_thread_leaves_a_region_of_another_thread_to_restore_itself():
    amp = ampx.init("torch", dtype="bfloat16", device="cpu")
    entered, stopped = threading.Event(), threading.Event()

    def worker():
        with amp.autocast():
            entered.set()
            stopped.wait(10)
        return torch.is_autocast_enabled("cpu")

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(worker)
        entered.wait(10)
        amp.shutdown()
        stopped.set()
        assert future.result() is False


def test_module_rules_do_not_reach_into_other_threads():
    class Waits(nn.Module):
        def forward(self, x):
            started.set()
            finished.wait(10)
            return x @ x

    started, finished = threading.Event(), threading.Event()
    amp = ampx.init("torch", dtype="bfloat16", device="cpu", deny=[Waits])

    def denied():
        amp.enter_thread()
        return Waits()(torch.ones(2, 2)).dtype

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(denied)
        started.wait(10)
        assert product_dtype() == torch.bfloat16
        finished.set()
        assert future.result() == torch.float32


class Products(torch.utils.data.Dataset):
    """Items that are computed by a matrix product."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.ones(2, 2) @ torch.ones(2, 2)


def dtype_of_a_forked_worker():
    loader = torch.utils.data.DataLoader(Products(), num_workers=1, multiprocessing_context="fork")
    return {batch.dtype for batch in loader}


def test_native_autocast_reaches_into_forked_workers_of_data_loaders():
    with torch.autocast("cpu", torch.bfloat16):
        assert dtype_of_a_forked_worker() == {torch.bfloat16}


def test_workers_of_data_loaders_compute_as_without_a_session():
    loop = torch.utils.data._utils.worker._worker_loop
    ampx.init("torch", dtype="bfloat16", device="cpu")
    assert dtype_of_a_forked_worker() == {torch.float32}
    assert product_dtype() == torch.bfloat16
    # Spawned workers import it by its name, which stands for torch's own there.
    ours = torch.utils.data._utils.worker._worker_loop
    assert pickle.loads(pickle.dumps(ours)) is ours
    assert b"ampx" not in pickle.dumps(ours)
    ampx.shutdown()
    assert torch.utils.data._utils.worker._worker_loop is loop
