"""Where a log writes: TensorBoard, Weights & Biases, MLflow, JSON lines, a function. Each package loads when asked for.

A target that was opened here is closed here; what the script brings is only flushed.
"""

from __future__ import annotations

import abc
import importlib
import importlib.util
import itertools
import json
import math
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ampx.errors import InvalidOptionError
from ampx.events import Event, ScaleCollapsed

NAMES: Final = "a path that ends in .jsonl, tensorboard:FOLDER, wandb:PROJECT, mlflow:TRACKING_URI"
ACCEPTED: Final = (
    f"{NAMES}; a SummaryWriter, a writer of tf.summary, a W&B run, an MLflow run, a function of (values, step=…), an "
    f"object with log_metrics, or a plugin with the hook ampx_event"
)


@dataclass(frozen=True)
class Row:
    """One event, and its numbers by name."""

    event: Event
    values: dict[str, float]
    drawn: bool = True  # its numbers belong into curves

    def series(self) -> dict[str, float]:
        """Return the numbers that belong into curves, by the names that these have.

        `ampx/` stands in front, and where it is not the first, the loss scale: `ampx/group_1/`, `ampx/loss_1/`.
        """
        if not self.drawn:
            return {}
        prefix = "ampx/"
        if self.event.group:
            prefix += f"group_{self.event.group}/"
        if self.event.loss_id:
            prefix += f"loss_{self.event.loss_id}/"
        return {f"{prefix}{name}": value for name, value in self.values.items()}


class Target(abc.ABC):
    """Takes rows."""

    @abc.abstractmethod
    def write(self, row: Row) -> None:
        """Write one row."""

    def flush(self) -> None:
        """Have what was written reach its file."""

    def close(self) -> None:
        """Close what was opened here."""


class JsonLines(Target):
    """One JSON object a line and event, at the end of a file."""

    def __init__(self, path: Path) -> None:
        if not path.parent.is_dir():
            raise InvalidOptionError(
                f"log_to got {str(path)!r}, and there is no folder {str(path.parent)!r}; accepted: a file in a folder "
                f"that exists. Make the folder."
            )
        try:
            self._file = path.open("a", buffering=1, encoding="utf-8")  # by lines: a run that is killed keeps its own
        except OSError as error:
            raise InvalidOptionError(
                f"log_to got {str(path)!r}, which cannot be written: {error.strerror}; accepted: a file that you may "
                f"write. Choose another."
            ) from error

    def write(self, row: Row) -> None:
        """Write a line; a number that is not finite is null, because JSON has none."""
        event = row.event
        line: dict[str, Any] = {
            "event": type(event).__name__,
            "time": time.time(),
            "framework": event.framework,
            "group": event.group,
            "loss_id": event.loss_id,
            "step": event.step,
            **{name: value if math.isfinite(value) else None for name, value in row.values.items()},
        }
        if isinstance(event, ScaleCollapsed):
            line["parameters"] = list(event.parameters)
        self._file.write(json.dumps(line, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Curves(Target):
    """Curves that a function draws: it is called with the numbers by name, and `step=`."""

    def __init__(
        self,
        draw: Callable[..., Any],
        flush: Callable[[], Any] = lambda: None,
        close: Callable[[], Any] = lambda: None,
    ) -> None:
        self._draw, self._flush, self._close = draw, flush, close

    def write(self, row: Row) -> None:
        """Draw the numbers of a row, if it has some."""
        values = row.series()
        if values:
            self._draw(values, step=row.event.step)

    def flush(self) -> None:
        """As the target does."""
        self._flush()

    def close(self) -> None:
        """As the target does."""
        self._close()


def find(target: Any) -> Target:
    """Return what writes to a target.

    Raises:
        InvalidOptionError: It is not understood, or its package is missing.
    """
    if isinstance(target, (str, os.PathLike)):
        return _named(os.fspath(target))
    root = target.__name__ if isinstance(target, ModuleType) else type(target).__module__.partition(".")[0]
    if callable(getattr(target, "add_scalar", None)):  # of torch.utils.tensorboard, of tensorboardX
        return _summary_writer(target)
    if callable(getattr(target, "as_default", None)):
        return _tf_summary(target)
    if root == "wandb":
        return _wandb_run(target)
    info = getattr(target, "info", None)
    if root == "mlflow" and info is not None:
        return _mlflow_run(target, info.run_id)
    log_metrics = getattr(target, "log_metrics", None)  # of Lightning's loggers, of Comet, of mlflow itself
    if callable(log_metrics):
        return Curves(log_metrics)
    if not isinstance(target, type) and callable(target):
        return Curves(target)
    raise InvalidOptionError(f"log_to got {target!r}; accepted: {ACCEPTED}. Pass one of these.")


def _named(name: str | bytes) -> Target:
    """Open what a text names."""
    name = os.fsdecode(name)
    if name.endswith(".jsonl"):
        return JsonLines(Path(name))
    kind, _, place = name.partition(":")
    if kind in _KINDS and place:
        return _KINDS[kind](place)
    raise InvalidOptionError(f"log_to got {name!r}; accepted: {NAMES}; in code an object, too. Pass one of these.")


def _module(name: str, kind: str, package: str) -> Any:
    """Import a target's package."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InvalidOptionError(
            f"log_to got a target of {kind}, whose package is not importable: {error}; accepted: targets whose package "
            f"is installed. Install it with `pip install {package}`."
        ) from error


_files: Final = itertools.count()


# -- TensorBoard ---------------------------------------------------------------------------------------


def _open_tensorboard(folder: str) -> Target:
    """Write an event file by what is installed: TensorBoard, or else tensorboardX.

    TensorBoard's own writer would import TensorFlow wherever that is installed, so the file is opened here.
    """
    if importlib.util.find_spec("tensorboard") is None and importlib.util.find_spec("tensorboardX") is not None:
        writer = importlib.import_module("tensorboardX").SummaryWriter(folder)
        return _summary_writer(writer, writer.close)
    records = _module("tensorboard.summary.writer.record_writer", "tensorboard", "tensorboard")
    event_pb2 = importlib.import_module("tensorboard.compat.proto.event_pb2")
    summary_pb2 = importlib.import_module("tensorboard.compat.proto.summary_pb2")
    Path(folder).mkdir(parents=True, exist_ok=True)
    name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.ampx.{next(_files)}"
    file = Path(folder, name).open("wb", buffering=0)  # noqa: SIM115 -- `close` does
    writer = records.RecordWriter(file)
    writer.write(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def draw(values: dict[str, float], step: int) -> None:
        points = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summary = summary_pb2.Summary(value=points)
        writer.write(event_pb2.Event(wall_time=time.time(), step=step, summary=summary).SerializeToString())

    return Curves(draw, writer.flush, writer.close)


def _summary_writer(writer: Any, close: Callable[[], Any] | None = None) -> Target:
    def draw(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Curves(draw, writer.flush, close or writer.flush)


def _tf_summary(writer: Any) -> Target:
    tf = _module("tensorflow", "tf.summary", "tensorflow")
    _module("tensorboard", "tf.summary", "tensorboard")  # TensorFlow comes without it, and says so in the first step

    def draw(values: dict[str, float], step: int) -> None:
        # A log is written on the host, whatever is being traced at the moment.
        with tf.init_scope(), writer.as_default(step=step), tf.summary.record_if(True):
            for name, value in values.items():
                tf.summary.scalar(name, value)

    return Curves(draw, writer.flush, writer.flush)


# -- Weights & Biases, MLflow --------------------------------------------------------------------------


def _open_wandb(project: str) -> Target:
    """Start a run of its own: the script may have one, whose configuration and rows are not touched."""
    wandb = _module("wandb", "wandb", "wandb")
    mode = os.environ.get("WANDB_MODE", "offline")
    settings = wandb.Settings(console="off")  # what the script prints is not the log's
    run = wandb.init(project=project, mode=mode, reinit="create_new", settings=settings)
    return _rows_of_wandb(run, own=True)


def _wandb_run(target: Any) -> Target:
    run = target.run if isinstance(target, ModuleType) else target
    if run is None or not callable(getattr(run, "define_metric", None)):
        raise InvalidOptionError(
            f"log_to got {target!r}, which has no run; accepted: a W&B run that goes on. Call run = wandb.init(…) "
            f"first and pass run."
        )
    return _rows_of_wandb(run, own=False)


def _rows_of_wandb(run: Any, own: bool) -> Target:
    run.define_metric("ampx/step")
    run.define_metric("ampx/*", step_metric="ampx/step")

    def draw(values: dict[str, float], step: int) -> None:
        # W&B's own step is the script's: these numbers go into the row that its next `run.log` ends.
        run.log({**values, "ampx/step": step}, commit=own)

    return Curves(draw, close=run.finish if own else lambda: None)


def _open_mlflow(uri: str) -> Target:
    """Start a run by a client of its own, so that the script's own `mlflow` calls go on as they were."""
    mlflow = _module("mlflow", "mlflow", "mlflow")
    try:
        client = mlflow.MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name("ampx")
        number = client.create_experiment("ampx") if experiment is None else experiment.experiment_id
        run = client.create_run(number).info.run_id
    except mlflow.exceptions.MlflowException as error:
        raise InvalidOptionError(
            f"log_to got 'mlflow:{uri}', which MLflow refuses: {error}; accepted: a tracking URI that MLflow takes, "
            f"such as a folder, sqlite:///mlflow.db or a server. Correct it."
        ) from error
    return Curves(_mlflow_points(client, run), close=lambda: client.set_terminated(run))


def _mlflow_run(target: Any, run: str) -> Target:
    mlflow = _module("mlflow", "mlflow", "mlflow")
    return Curves(_mlflow_points(mlflow.MlflowClient(), run))


def _mlflow_points(client: Any, run: str) -> Callable[..., None]:
    entities = importlib.import_module("mlflow.entities")

    def draw(values: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        client.log_batch(run, [entities.Metric(name, value, now, step) for name, value in values.items()])

    return draw


_KINDS: Final[dict[str, Callable[[str], Target]]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
}
