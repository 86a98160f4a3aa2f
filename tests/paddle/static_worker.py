"""Builds one static program, runs it over a pattern of overflows, and prints what it saw as JSON."""

import json
import sys
import warnings

warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import paddle  # noqa: E402

import ampx  # noqa: E402

PATTERN = (0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0)


def build(options, wrap):
    paddle.enable_static()
    paddle.seed(7)
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup):
        x = paddle.static.data("x", [4, 8], "float32")
        y = paddle.static.data("y", [4, 1], "float32")
        x.stop_gradient = options.get("stop_gradient", False)
        hidden, head = paddle.nn.Linear(8, 16), paddle.nn.Linear(16, 1)
        out = head(paddle.nn.functional.relu(hidden(x)))
        loss = (out.astype("float32") - y).square().mean()
        raw = getattr(paddle.optimizer, options.get("optimizer", "Momentum"))(0.01)
        opt = wrap(raw)
        opt.minimize(loss)
    casts = sum(op.name() == "pd_op.cast" for op in main.global_block().ops)
    return main, startup, loss, hidden.weight, opt, casts


def run(options):
    dtype = options.get("dtype", "float32")
    paddle.enable_static()
    if options.get("plain"):
        wrap = lambda raw: raw  # noqa: E731
    else:
        amp = ampx.init("paddle", dtype=dtype, loss_scale="dynamic")
        scale = ampx.LossScale(**options.get("loss_scale", {"growth_interval": 3}))
        wrap = lambda raw: amp.wrap_optimizer(raw, loss_scale=scale, **options.get("clip", {}))  # noqa: E731
    main, startup, loss, weight, opt, casts = build(options, wrap)
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(startup)
    if "load" in options:
        amp.load_state_dict(options["load"])
    rng = np.random.default_rng(0)
    images = rng.normal(size=(4, 8)).astype("float32")
    labels = images.sum(1, keepdims=True)
    seen = {"casts": casts, "losses": [], "weights": [], "results": [], "before": None}
    if not options.get("plain"):
        seen["before"] = opt.last_step is None
    for overflow in options.get("pattern", PATTERN):
        given = images.copy()
        if overflow:
            given[0, 0] = np.inf
        value, now = executor.run(main, feed={"x": given, "y": labels}, fetch_list=[loss, weight])
        seen["losses"].append(float(value))
        seen["weights"].append(now.ravel().tolist())
        if not options.get("plain"):
            result = opt.last_step
            seen["results"].append([result.applied, result.scale, result.next_scale, result.consecutive_skips])
    if not options.get("plain"):
        seen["state"] = amp.state_dict()
        seen["loss_scale"] = opt.loss_scale
    print("JSON" + json.dumps(seen))


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
