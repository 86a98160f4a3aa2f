"""`ampx migrate` on scripts for `apex.amp`: what they become, and what is left to a human."""

import textwrap

import pytest

# Name, before, after. The right-hand sides are written by hand.
CASES = [
    (
        "the recipe",
        """\
        import torch
        from apex import amp

        model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
        for x, y in data:
            loss = loss_fn(model(x), y)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
            optimizer.step()
        torch.save({"amp": amp.state_dict()}, path)
        amp.load_state_dict(torch.load(path)["amp"])
        """,
        """\
        import ampx
        import torch

        ampx.init("torch", dtype="float16")
        optimizer = ampx.wrap_optimizer(optimizer)
        for x, y in data:
            loss = loss_fn(model(x), y)
            with ampx.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            ampx.clip_grad_norm(optimizer, 1.0)
            optimizer.step()
        torch.save({"amp": ampx.state_dict()}, path)
        ampx.load_state_dict(ampx.import_state(torch.load(path)["amp"]))
        """,
    ),
    (
        "O2, an import in a try, options that are left out",
        """\
        try:
            from apex import amp
        except ImportError:
            amp = None

        if amp is None:
            raise SystemExit
        model, optimizer = amp.initialize(
            model, optimizer, opt_level="O2", keep_batchnorm_fp32=True, loss_scale="128.0", verbosity=0
        )
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        """,
        """\
        try:
            import ampx
        except ImportError:
            ampx = None

        if ampx is None:
            raise SystemExit
        ampx.init("torch", dtype="float16", level="O2", loss_scale=128.0)
        model, optimizer = ampx.prepare(model, optimizer)
        optimizer = ampx.wrap_optimizer(optimizer)
        with ampx.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        """,
    ),
    (
        "two networks, three losses",
        """\
        import apex.amp as apex_amp

        [netD, netG], [optD, optG] = apex_amp.initialize(
            [netD, netG], [optD, optG], opt_level="O1", num_losses=3, min_loss_scale=1.0, max_loss_scale=2.0**20
        )
        with apex_amp.scale_loss(errD_real, optD, loss_id=0) as scaled:
            scaled.backward()
        with apex_amp.scale_loss(errD_fake, optD, loss_id=1) as scaled:
            scaled.backward()
        optD.step()
        with apex_amp.scale_loss(errG, optG, 2, delay_unscale=True) as scaled:
            scaled.backward()
        optG.step()
        """,
        """\
        import ampx

        ampx.init("torch", dtype="float16", loss_scale=ampx.LossScale(min_scale=1.0, max_scale=2.0**20))
        optD = ampx.wrap_optimizer(optD)
        optG = ampx.wrap_optimizer(optG)
        with ampx.scale_loss(errD_real, optD) as scaled:
            scaled.backward()
        with ampx.scale_loss(errD_fake, optD, loss_id=1) as scaled:
            scaled.backward()
        optD.step()
        with ampx.scale_loss(errG, optG, loss_id=2) as scaled:
            scaled.backward()
        optG.step()
        """,
    ),
    (
        "options from the command line, another name for the model",
        """\
        from apex import amp

        net, opt = amp.initialize(model, opt, opt_level=args.opt_level, loss_scale=args.loss_scale, enabled=args.amp)
        with amp.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
        """,
        """\
        import ampx

        ampx.init(
            "torch",
            dtype="float16",
            level=args.opt_level,
            loss_scale=(
                "auto"
                if args.loss_scale is None
                else "dynamic" if args.loss_scale == "dynamic"
                else float(args.loss_scale)
            ),
            enabled=bool(args.amp),
        )
        net, opt = ampx.prepare(model, opt)
        opt = ampx.wrap_optimizer(opt)
        with ampx.scale_loss(loss, opt) as scaled_loss:
            scaled_loss.backward()
        """,
    ),
    (
        "gradients are true where somebody looks",
        """\
        import torch
        from apex import amp

        def norms(model):
            return [p.grad.norm() for p in model.parameters()]

        def train(model, optimizer):
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            seen = norms(model)
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
            for p in model.parameters():
                p.grad = None
        """,
        """\
        import ampx
        import torch

        def norms(model):
            return [p.grad.norm() for p in model.parameters()]

        def train(model, optimizer):
            with ampx.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            ampx.unscale(optimizer)
            seen = norms(model)
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
            optimizer.step()
            for p in model.parameters():
                p.grad = None
        """,
    ),
    (
        "with and without",
        """\
        import torch

        def train(model, optimizer):
            if args.fp16:
                from apex import amp
                with amp.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            if args.fp16:
                for p in amp.master_params(optimizer):
                    print(p.grad)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if verbose:
                print(model.weight.grad)
            optimizer.step()
        """,
        """\
        import torch

        def train(model, optimizer):
            if args.fp16:
                import ampx
                with ampx.scale_loss(loss, optimizer) as scaled_loss:
                    scaled_loss.backward()
            else:
                loss.backward()
            if args.fp16:
                ampx.unscale(optimizer)
                for p in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                    print(p.grad)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if verbose:
                print(model.weight.grad)
            optimizer.step()
        """,
    ),
    (
        "functions",
        """\
        import ops
        from apex import amp

        amp.register_float_function(ops, "softmax")

        @amp.half_function
        def product(a, b):
            with amp.disable_casts():
                return ops.softmax(a @ b)

        def build(model, opt):
            return amp.initialize(model, opt)

        def step(loss, opt):
            with amp.scale_loss(loss, opt) as scaled_loss:
                scaled_loss.backward()
            opt.step()
        """,
        """\
        import ops
        import ampx

        ops.softmax = ampx.float_function(ops.softmax)

        @ampx.half_function
        def product(a, b):
            with ampx.autocast(enabled=False):
                return ops.softmax(a @ b)

        def build(model, opt):
            ampx.init("torch", dtype="float16")
            opt = ampx.wrap_optimizer(opt)
            return model, opt

        def step(loss, opt):
            with ampx.scale_loss(loss, opt) as scaled_loss:
                scaled_loss.backward()
            opt.step()
        """,
    ),
    (
        "a model alone",
        """\
        import apex

        net = apex.amp.initialize(model, opt_level="O3")
        """,
        """\
        import ampx

        ampx.init("torch", dtype="float16", level="O3")
        net = ampx.prepare(model)
        """,
    ),
]


@pytest.mark.parametrize(("before", "after"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_it_becomes(before, after, migrate):
    status, migrated, findings = migrate(textwrap.dedent(before))
    assert migrated == textwrap.dedent(after)
    assert status == "changed"
    assert [finding for finding in findings if finding[1] == "todo"] == []


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("amp.initialize(model, optimizer)", "what `amp.initialize` returns is not assigned"),
        (
            "pair = amp.initialize(model, optimizer)",
            "`amp.initialize` returns a model and an optimizer, but not into two names",
        ),
        ("m, o = amp.initialize(*both)", "`amp.initialize` with arguments that cannot be read"),
        (
            "m, o = amp.initialize(m, o, opt_level='O2', keep_batchnorm_fp32=False)",
            '`keep_batchnorm_fp32=False` at level "O2"',
        ),
        (
            "m, o = amp.initialize(m, o, opt_level='O2', master_weights=False)",
            "`master_weights` overrides a property of the level",
        ),
        (
            "amp.register_half_function(torch, 'mv')",
            "`amp.register_half_function(torch, 'mv')` registers a function of PyTorch",
        ),
        ("handle = amp.init()", "`amp.init` has no counterpart that is known"),
        ("scaled = amp.scale_loss(loss, optimizer)", "`amp.scale_loss` is not entered by `with`"),
        ("train(amp)", "the module `apex.amp` is used as a value"),
        ("m, o = amp.initialize(m, o); print(m)", "`m, o = amp.initialize(m, o)` shares its line"),
    ],
)
def test_what_is_not_understood_leaves_the_file_alone(code, what, migrate):
    status, _, findings = migrate(f"import torch\nfrom apex import amp\n{code}\n")
    assert status == "blocked"
    assert findings == [(3, "todo", what)]


def test_the_rest_of_apex_is_listed_once_a_name(migrate):
    status, _, findings = migrate(
        "from apex.parallel import DistributedDataParallel as DDP\n\na = DDP(model)\nb = DDP(other)\n"
    )
    assert status == "unchanged"
    assert findings == [(3, "todo", "`apex.parallel.DistributedDataParallel` is still apex's")]


def test_an_option_that_only_the_command_line_knows_is_left_to_a_human(migrate):
    status, _, findings = migrate(
        "from apex import amp\n\nm, o = amp.initialize(m, o, opt_level='O2', keep_batchnorm_fp32=args.keep)\n"
        "with amp.scale_loss(loss, o) as scaled:\n    scaled.backward()\n"
    )
    assert status == "changed"
    assert findings == [(3, "todo", "`keep_batchnorm_fp32=args.keep` is left out")]
