"""`ampx migrate` on scripts for `torch.amp`: what they become, and what is left to a human."""

import textwrap

import pytest

# Name, before, after. The right-hand sides are written by hand.
CASES = [
    (
        "the recipe",
        """\
        import torch
        from torch.cuda.amp import GradScaler, autocast

        model = torch.nn.Linear(4, 1).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = GradScaler()
        for x, y in data:
            optimizer.zero_grad()
            with autocast():
                loss = loss_fn(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        """\
        import ampx
        import torch

        model = torch.nn.Linear(4, 1).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = ampx.init("torch", dtype="float16", process_wide=False, enabled=torch.cuda.is_available())
        optimizer = ampx.wrap_optimizer(optimizer)
        for x, y in data:
            optimizer.zero_grad()
            with ampx.autocast():
                loss = loss_fn(model(x), y)
            with ampx.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        """,
    ),
    (
        "full names, options, clipping, a switch",
        """\
        import torch

        optimizer = torch.optim.Adam(parameters)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12, growth_interval=100, enabled=args.amp)
        with torch.amp.autocast("cuda", dtype=torch.bfloat16, enabled=args.amp):
            loss = model(x)
        scaler.scale(loss / 4).backward(retain_graph=True)  # accumulates
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        scaler.step(optimizer)
        scaler.update()
        """,
        """\
        import ampx
        import torch

        optimizer = torch.optim.Adam(parameters)
        scaler = ampx.init(
            "torch",
            dtype="bfloat16",
            loss_scale=ampx.LossScale(init_scale=2.0**12, growth_interval=100),
            process_wide=False,
            enabled=bool(args.amp) and torch.cuda.is_available(),
        )
        optimizer = ampx.wrap_optimizer(optimizer)
        with ampx.autocast(enabled=args.amp):
            loss = model(x)
        with ampx.scale_loss(loss / 4, optimizer) as scaled_loss:  # accumulates
            scaled_loss.backward(retain_graph=True)
        ampx.unscale(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        """,
    ),
    (
        "on the CPU, with the optimizer made after the scaler",
        """\
        import torch

        def main():
            scaler = torch.amp.GradScaler("cpu")
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            with torch.autocast(device_type="cpu"):
                loss = model(x)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        """,
        """\
        import ampx
        import torch

        def main():
            scaler = ampx.init(
                "torch",
                dtype="bfloat16",
                device="cpu",
                loss_scale="dynamic",
                process_wide=False,
                nan_loss="skip",
            )
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            optimizer = ampx.wrap_optimizer(optimizer)
            with ampx.autocast():
                loss = model(x)
            with ampx.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        """,
    ),
    (
        "functions that get the scaler, checkpoints, the scale, annotations",
        """\
        import torch
        from torch.cuda.amp import GradScaler

        def train(model, opt, scaler: GradScaler = None):
            with torch.cuda.amp.autocast():
                loss = model(x)
            if scaler is not None:
                scaler.scale(loss).backward()
                scaler.step(opt)
                scaler.update()
            return scaler.get_scale() if scaler.is_enabled() else 1.0

        def main():
            if args.sgd:
                optimizer = torch.optim.SGD(parameters, lr=0.1)
            else:
                optimizer = torch.optim.Adam(parameters)
            scaler = GradScaler()
            scaler.load_state_dict(saved["scaler"])
            train(model, optimizer, scaler=scaler)
            torch.save({"scaler": scaler.state_dict()}, path)
        """,
        """\
        import ampx
        import torch

        def train(model, opt, scaler: ampx.Amp = None):
            with ampx.autocast():
                loss = model(x)
            if scaler is not None:
                with ampx.scale_loss(loss, opt) as scaled_loss:
                    scaled_loss.backward()
                opt.step()
            return opt.loss_scale if scaler.enabled else 1.0

        def main():
            if args.sgd:
                optimizer = torch.optim.SGD(parameters, lr=0.1)
            else:
                optimizer = torch.optim.Adam(parameters)
            scaler = ampx.init(
                "torch",
                dtype="float16",
                process_wide=False,
                enabled=torch.cuda.is_available(),
            )
            optimizer = ampx.wrap_optimizer(optimizer)
            scaler.load_state_dict(ampx.import_state(saved["scaler"]))
            train(model, optimizer, scaler=scaler)
            torch.save({"scaler": scaler.state_dict()}, path)
        """,
    ),
    (
        "a class",
        """\
        import torch

        class Trainer:
            def __init__(self):
                self.optimizer = torch.optim.SGD(parameters, lr=0.1)
                self.scaler = torch.cuda.amp.GradScaler()

            def step(self, loss):
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
        """,
        """\
        import ampx
        import torch

        class Trainer:
            def __init__(self):
                self.optimizer = torch.optim.SGD(parameters, lr=0.1)
                self.scaler = ampx.init(
                    "torch",
                    dtype="float16",
                    process_wide=False,
                    enabled=torch.cuda.is_available(),
                )
                self.optimizer = ampx.wrap_optimizer(self.optimizer)

            def step(self, loss):
                with ampx.scale_loss(loss, self.optimizer) as scaled_loss:
                    scaled_loss.backward()
                self.optimizer.step()
        """,
    ),
    (
        "a scaler that may be None",
        """\
        import torch

        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scaler = torch.cuda.amp.GradScaler() if args.amp else None
        with torch.autocast("cuda", enabled=scaler is not None):
            loss = model(x)
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        """,
        """\
        import ampx
        import torch

        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scaler = ampx.init(
            "torch",
            dtype="float16",
            process_wide=False,
            enabled=torch.cuda.is_available(),
        ) if args.amp else None
        if scaler is not None:
            optimizer = scaler.wrap_optimizer(optimizer)
        with torch.autocast("cuda", enabled=scaler is not None):
            loss = model(x)
        if scaler is not None:
            with ampx.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        else:
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "an optimizer that is None at first, a region of another device",
        """\
        import torch

        optimizer = None
        scaler = torch.amp.GradScaler("cuda")
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        """,
        """\
        import ampx
        import torch

        optimizer = None
        scaler = ampx.init("torch", dtype="float16", process_wide=False, enabled=torch.cuda.is_available())
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer = ampx.wrap_optimizer(optimizer)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x)
        with ampx.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        """,
    ),
    (
        "comments inside what is rewritten",
        """\
        import torch

        optimizer = torch.optim.SGD(parameters, lr=0.1)
        # the scaler
        scaler = torch.amp.GradScaler(
            "cpu",  # no CUDA here
            init_scale=8.0,  # small
        )  # made
        scaler.scale(
            # of the batch
            loss
        ).backward()
        scaler.step(optimizer); scaler.update()
        """,
        """\
        import ampx
        import torch

        optimizer = torch.optim.SGD(parameters, lr=0.1)
        # the scaler
        # no CUDA here
        # small
        scaler = ampx.init(
            "torch",
            dtype="bfloat16",
            device="cpu",
            loss_scale=ampx.LossScale(init_scale=8.0),
            process_wide=False,
            nan_loss="skip",
        )  # made
        optimizer = ampx.wrap_optimizer(optimizer)
        # of the batch
        with ampx.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step(); pass
        """,
    ),
    (
        "a script that does not import torch itself",
        """\
        import models
        from torch.cuda import amp

        optimizer = models.optimizer()
        scaler = amp.GradScaler()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        """,
        """\
        import models
        import ampx
        import torch

        optimizer = models.optimizer()
        scaler = ampx.init("torch", dtype="float16", process_wide=False, enabled=torch.cuda.is_available())
        optimizer = ampx.wrap_optimizer(optimizer)
        with ampx.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        """,
    ),
    (
        "a step without the scaler, where its switch is off",
        """\
        import torch

        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=(args.amp is True))
        if (args.amp is True):
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        """,
        """\
        import ampx
        import torch

        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scaler = ampx.init(
            "torch",
            dtype="bfloat16",
            device="cpu",
            loss_scale="dynamic",
            process_wide=False,
            nan_loss="skip",
            enabled=(args.amp is True),
        )
        optimizer = ampx.wrap_optimizer(optimizer)
        if (args.amp is True):
            with ampx.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
        else:
            loss.backward()
            optimizer.step()
        """,
    ),
    (
        "several losses and optimizers, one scaler",
        """\
        import torch

        opt_a = torch.optim.SGD(a, lr=0.1)
        opt_b = torch.optim.SGD(b, lr=0.1)
        scaler = torch.amp.GradScaler()
        scaler.scale(loss_0).backward(retain_graph=True)
        scaler.scale(loss_1).backward()
        scaler.step(opt_a)
        scaler.step(opt_b)
        scaler.update()
        """,
        """\
        import ampx
        import torch

        opt_a = torch.optim.SGD(a, lr=0.1)
        opt_b = torch.optim.SGD(b, lr=0.1)
        scaler = ampx.init("torch", dtype="float16", process_wide=False, enabled=torch.cuda.is_available())
        opt_a, opt_b = ampx.wrap_optimizer([opt_a, opt_b])
        with ampx.scale_loss(loss_0, [opt_a, opt_b]) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
        with ampx.scale_loss(loss_1, [opt_a, opt_b]) as scaled_loss:
            scaled_loss.backward()
        opt_a.step()
        opt_b.step()
        """,
    ),
    (
        "a scaled loss with a name, comments, an import in a try",
        """\
        try:
            from torch.cuda.amp import GradScaler
        except ImportError:
            raise SystemExit("too old")
        import torch

        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scaler = GradScaler()
        # the loss, scaled
        scaled = scaler.scale(loss)
        scaled.backward()
        scaler.step(optimizer)
        # for the next step
        scaler.update()  # the scale
        if done:
            scaler.update()
        """,
        """\
        try:
            pass
        except ImportError:
            raise SystemExit("too old")
        import ampx
        import torch

        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scaler = ampx.init("torch", dtype="float16", process_wide=False, enabled=torch.cuda.is_available())
        optimizer = ampx.wrap_optimizer(optimizer)
        # the loss, scaled
        with ampx.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        # for the next step
        # the scale
        if done:
            pass
        """,
    ),
    (
        "regions on another device or switch stay",
        """\
        import torch

        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scaler = torch.cuda.amp.GradScaler(enabled=dtype == "float16")
        with torch.amp.autocast(device_type=device, dtype=dtype):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        """,
        """\
        import ampx
        import torch

        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scaler = ampx.init(
            "torch",
            dtype="float16",
            process_wide=False,
            enabled=(dtype == "float16") and torch.cuda.is_available(),
        )
        optimizer = ampx.wrap_optimizer(optimizer)
        with torch.amp.autocast(device_type=device, dtype=dtype):
            loss = model(x)
        with ampx.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        """,
    ),
]


@pytest.mark.parametrize(("before", "after"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_it_becomes(before, after, migrate):
    status, migrated, findings = migrate(textwrap.dedent(before))
    assert migrated == textwrap.dedent(after)
    assert status == "changed"
    assert [finding for finding in findings if finding[1] == "todo"] == []


HEAD = """\
import torch
optimizer = torch.optim.SGD(parameters, lr=0.1)
scaler = torch.amp.GradScaler()
"""
LOOP = """\
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
"""


@pytest.mark.parametrize(
    ("before", "line", "what"),
    [
        (
            HEAD + LOOP + "helper(scaler)\n",
            7,
            "the scaler is passed to `helper`, which is no function of the files that are migrated",
        ),
        (
            HEAD + LOOP + "scaler.set_growth_interval(3)\n",
            7,
            "`scaler.set_growth_interval(3)` has no counterpart that is known",
        ),
        (HEAD + LOOP + "x = scaler._scale\n", 7, "`scaler._scale` has no counterpart that is known"),
        (HEAD + LOOP + "scaler.update(2.0)\n", 7, "`scaler.update(2.0)` has no counterpart that is known"),
        (HEAD + LOOP + "y = scaler.step(optimizer)\n", 7, "`scaler.step(optimizer)` has no counterpart that is known"),
        (
            HEAD + "g = torch.autograd.grad(scaler.scale(loss), p)\n" + LOOP,
            4,
            "`scaler.scale(loss)` is not followed by `.backward()`",
        ),
        (HEAD + LOOP + "scaler = other\n", 7, "`scaler` is the scaler here and something else there"),
        (HEAD + LOOP + "optimizer.step()\n", 7, "`optimizer.step()` steps without the scaler where there may be one"),
        (
            HEAD + LOOP.replace("scaler.update()", "before = scaler.get_scale()\nscaler.update()"),
            6,
            "`scaler.get_scale()` asks for the scale between `step` and `update`; ampx moves it in `step`",
        ),
        (HEAD, 3, "no optimizer is stepped through this scaler here"),
        (
            HEAD + LOOP.replace("scaler.step(optimizer)", "clip_grad_norm_(parameters, 1.0)\noptimizer.step()"),
            4,
            "the loss is scaled here, and there is no `scaler.step`: `optimizer.step()` applies scaled gradients, and "
            "those that overflowed",
        ),
        (HEAD + LOOP.replace("\nscaler.step", "; scaler.step"), 4, "`scaler.scale(loss).backward()` shares its line"),
        (
            HEAD + LOOP + "other = torch.amp.GradScaler()\nother.step(optimizer)\n",
            7,
            "a second scaler; a process has one session of ampx for PyTorch",
        ),
        (HEAD + LOOP + "ampx = 1\n", 3, "the file uses the name `ampx` already"),
        (
            HEAD + LOOP.replace("optimizer", "self.optimizers[0]"),
            5,
            "it cannot be told where `self.optimizers[0]` is made",
        ),
        (
            "import torch\nclass S(torch.amp.GradScaler):\n    pass\n",
            2,
            "`torch.amp.GradScaler` is used without being called",
        ),
        (
            "import torch\ndef train(opt):\n    scaler = torch.amp.GradScaler()\n"
            "    scaler.scale(loss).backward()\n    scaler.step(opt)\n    scaler.update()\n",
            5,
            "it cannot be told where `opt` is made",
        ),
        (
            "import torch\nfrom apex import amp\n"
            + HEAD
            + LOOP
            + 'model, opt = amp.initialize(model, opt, opt_level="O1")\n'
            + "with amp.scale_loss(loss, opt) as scaled:\n    scaled.backward()\n",
            5,
            "the file uses both apex.amp and torch.amp",
        ),
    ],
)
def test_what_is_not_understood_leaves_the_file_alone(before, line, what, migrate):
    status, _, findings = migrate(before)
    assert status == "blocked"
    assert findings == [(line, "todo", what)]


@pytest.mark.parametrize("twice", [False, True])
def test_the_scale_before_the_step_and_after_the_update_is_asked_for(twice, migrate):
    loop = (
        LOOP.replace("scaler.step", "before = scaler.get_scale()\nscaler.step")
        + "skipped = before > scaler.get_scale()\n"
    )
    status, after, _ = migrate(HEAD + loop * (1 + twice))
    assert status == "changed"
    assert after.count("before = optimizer.loss_scale\noptimizer.step()\n") == 1 + twice
    assert after.count("skipped = before > optimizer.loss_scale\n") == 1 + twice


@pytest.mark.parametrize(
    "before",
    [
        "import torch\n\n\ndef forward(self, x):\n    with torch.autocast('cuda'):\n        return self.net(x)\n",
        "from torch.cuda.amp import custom_fwd\n\n\n@custom_fwd\ndef forward(ctx, x):\n    return x\n",
        "from sklearn.preprocessing import StandardScaler\n\nscaler = StandardScaler()  # autocast\nscaler.scale(1)\n",
    ],
)
def test_what_works_beside_ampx_stays_and_needs_nobody(before, migrate):
    status, _, findings = migrate(before)
    assert status == "unchanged"
    assert [kind for _, kind, _ in findings if kind == "todo"] == []


def test_a_region_that_is_entered_before_the_session_stays(migrate):
    _, after, findings = migrate(
        "import torch\n\n\ndef warm_up():\n    with torch.cuda.amp.autocast():\n        model(x)\n\n\nwarm_up()\n"
        + HEAD.replace("import torch\n", "")
        + LOOP
    )
    assert "torch.cuda.amp.autocast()" in after
    assert (5, "note", "`torch.cuda.amp.autocast()` stays: it is entered before the session begins") in findings
