"""Do many things to files on all processors, where that pays."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, Final, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

_WORTH_PROCESSES: Final = 400_000  # bytes of files to parse; starting processes takes longer than reading fewer


def on_all_processors(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    sizes: Sequence[int],
    prepare: Callable[..., object] | None = None,
    *arguments: Any,
) -> Iterator[tuple[int, Result]]:
    """Yield the positions of tasks with what a function returns for them, as they are done.

    Args:
        function: A function of a module, since processes find it by its name.
        tasks: What it is called with, one by one.
        sizes: The bytes of each.
        prepare: Called first, in every process, with the arguments that follow.
        arguments: Those.
    """
    if sum(sizes) < _WORTH_PROCESSES or len(tasks) == 1 or (os.cpu_count() or 1) == 1:
        if prepare is not None:
            prepare(*arguments)
        yield from enumerate(map(function, tasks))
        return
    with ProcessPoolExecutor(os.cpu_count(), initializer=prepare, initargs=arguments) as pool:
        # The longest first, so that none of them is left to one processor at the end.
        order = sorted(range(len(tasks)), key=lambda position: -sizes[position])
        futures = {pool.submit(function, tasks[position]): position for position in order}
        for future in as_completed(futures):
            yield futures[future], future.result()
