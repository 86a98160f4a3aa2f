"""Casting is on where it should be, off where it should be, and restored on every way out."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import ampx
from ampx.policy import Dtype
from ampx.testing.base import KitTests, requires
from ampx.testing.checks import refused


class CastTests(KitTests):
    """The verb `cast` and the annotations built on it."""

    @requires("casting")
    def test_cast_touches_only_floating_leaves(self) -> None:
        """Integers, booleans, None and foreign values stay the same objects; containers keep their types."""
        tensor = self.subject.tensor
        whole, flags, text = tensor([1, 300, -7], "int64"), tensor([True, False], "bool"), "text"
        tree = {"a": (tensor([1.0, 0.5], "float32"), whole), "b": [flags, None, text, 3, 2.5, {"c": whole}]}
        cast = self.backend.cast(tree, self.subject.dtype)
        assert self.subject.dtype_of(cast["a"][0]) == self.subject.dtype
        assert self.subject.numbers(cast["a"][0]) == [1.0, 0.5]
        assert isinstance(cast["a"], tuple)
        assert isinstance(cast["b"], list)
        assert cast["a"][1] is whole
        assert cast["b"][0] is flags
        assert cast["b"][1:5] == [None, text, 3, 2.5]
        assert cast["b"][5]["c"] is whole

    @requires("casting")
    def test_cast_reaches_every_dtype(self) -> None:
        """To low precision with its rounding, and back to float32."""
        third = self.subject.tensor([1 / 3], "float32")
        for dtype, rounded in (("float16", 0.333251953125), ("bfloat16", 0.333984375)):
            if dtype in self.backend.capabilities.dtypes:
                low = self.backend.cast(third, dtype)
                assert self.subject.dtype_of(low) == dtype
                assert self.subject.numbers(low) == [rounded]
                wide = self.backend.cast([low], "float32")[0]
                assert self.subject.dtype_of(wide) == "float32"
                assert self.subject.numbers(wide) == [rounded]

    @requires("casting")
    def test_float_and_half_functions_cast_their_arguments(self) -> None:
        """Positional and named, nested too; integers stay; casting is off inside and as before after."""
        amp = self.start()
        before = self.subject.casting()
        for annotate, dtype in ((amp.float_function, "float32"), (amp.half_function, self.subject.dtype)):
            function: Callable[..., Any] = annotate(self._look)
            for passed in ("float32", self.subject.dtype):
                value, whole = self.subject.tensor([2.0], passed), self.subject.tensor([3], "int64")
                seen = function(value, whole, nested=[value])
                assert seen == (dtype, "int64", dtype, "float32")
            assert function.__name__ == "_look"
        assert self.subject.casting() == before

    @requires("promotes")
    def test_promote_functions_use_the_widest_dtype(self) -> None:
        """float32 as soon as one argument has it, else the compute dtype."""
        if not self.declares("casting"):
            pytest.skip("the backend casts nothing, so there is nothing to promote")
        amp = self.start()
        low, wide = self.subject.tensor([2.0], self.subject.dtype), self.subject.tensor([2.0], "float32")
        whole = self.subject.tensor([3], "int64")
        function = amp.promote_function(self._look)
        assert function(low, whole, nested=[wide]) == ("float32", "int64", "float32", "float32")
        assert function(low, whole, nested=[low]) == (self.subject.dtype, "int64", self.subject.dtype, "float32")

    @requires("casting")
    def test_annotated_functions_run_as_they_are_without_a_session(self) -> None:
        """A library may annotate its functions whether or not ampx is used; with a session they cast."""
        annotated = ampx.half_function(self.subject.dtype_of)
        value = self.subject.tensor([2.0], "float32")
        assert annotated(value) == "float32"
        self.start()
        assert annotated(value) == self.subject.dtype
        ampx.shutdown()
        assert annotated(value) == "float32"

    def _look(self, value: Any, whole: Any, nested: list[Any]) -> tuple[str, str, str, str]:
        """Return the dtypes of the arguments and of the framework's own computing."""
        dtype_of = self.subject.dtype_of
        return dtype_of(value), dtype_of(whole), dtype_of(nested[0]), self.subject.computes_in()


class RegionTests(KitTests):
    """`init` and `autocast`."""

    @requires("process casting")
    def test_init_switches_casting_on_for_the_process(self) -> None:
        """The framework's own operations compute in the dtype; after shutdown as before."""
        assert self.subject.computes_in() == "float32"
        self.start()
        assert self.subject.computes_in() == self.subject.dtype
        ampx.shutdown()
        assert self.subject.computes_in() == "float32"

    @requires("process casting")
    def test_threads_that_enter_cast_too(self) -> None:
        """After `enter_thread` a new thread computes as the first one does, which stays as it was."""
        amp = self.start()
        before = self.subject.casting()
        with ThreadPoolExecutor(1, initializer=amp.enter_thread) as pool:
            assert pool.submit(self.subject.computes_in).result() == self.subject.dtype
        assert self.subject.casting() == before

    @requires("regions")
    def test_the_body_of_scale_loss_runs_with_casting_off(self) -> None:
        """Off inside, and as before on every way out."""
        amp = self.start()
        bench, before = self.bench(amp), self.subject.casting()
        with amp.scale_loss(bench.loss(), bench.opt):
            assert self.subject.computes_in() == "float32"
        assert self.subject.casting() == before
        with pytest.raises(KeyError), amp.scale_loss(bench.loss(), bench.opt):
            raise KeyError("body")
        assert self.subject.casting() == before

    @requires("regions")
    def test_the_update_runs_with_casting_off(self) -> None:
        """Off while the framework's own update runs, and as before after it, in a region too."""
        amp = self.start()
        bench, before, seen = self.bench(amp), self.subject.casting(), list[str]()
        self.subject.watch_update(bench.raw, lambda: seen.append(self.subject.computes_in()))
        assert bench.train().applied
        assert self.subject.casting() == before
        with amp.autocast():
            inside = self.subject.casting()
            bench.train()
            assert self.subject.casting() == inside
        assert seen == ["float32", "float32"]

    @requires("regions")
    def test_casting_only_in_regions(self) -> None:
        """`process_wide=False` casts nowhere but inside `autocast`."""
        amp = self.start(process_wide=False)
        assert self.subject.casting() == self.outside
        with amp.autocast():
            assert self.subject.computes_in() == self.subject.dtype
        assert self.subject.casting() == self.outside
        bench = self.bench(amp)
        assert bench.train().applied
        assert self.subject.casting() == self.outside

    @requires("casting")
    def test_a_region_casts_or_is_refused(self) -> None:
        """A region that does nothing would be silent, where the framework has no switch for it too."""
        if self.backend.capabilities.autocast == "process":
            pytest.skip(f"backend {self.backend.name!r} casts for the whole process: it has no regions")
        amp = self.start(process_wide=False)
        try:
            with amp.autocast():
                assert self.subject.casting() != self.outside, "the region neither casts nor refuses"
        except ampx.UnsupportedByBackendError:
            assert self.backend.capabilities.autocast == "explicit", "regions are declared, but refused"
        assert self.subject.casting() == self.outside

    @requires("regions")
    def test_regions_nest_and_restore(self) -> None:
        """Off in on in off, entered again and again; each exit gives back what was."""
        amp = self.start()
        on, off, dtype = amp.autocast(), amp.autocast(enabled=False), self.subject.dtype
        states = [self.subject.casting()]
        with off:
            states.append(self.subject.casting())
            assert self.subject.computes_in() == "float32"
            with on:
                assert self.subject.computes_in() == dtype
                with off, on:
                    assert self.subject.computes_in() == dtype
                assert self.subject.computes_in() == dtype
            assert self.subject.casting() == states[1]
        assert self.subject.casting() == states[0]

    @requires("regions")
    def test_regions_restore_after_exceptions(self) -> None:
        """An exception passes through, and casting is as before the region."""
        amp = self.start()
        before = self.subject.casting()
        with pytest.raises(KeyError, match="inner"), amp.autocast(enabled=False), amp.autocast():
            raise KeyError("inner")
        assert self.subject.casting() == before
        with amp.autocast(enabled=False):
            outer = self.subject.casting()
            with pytest.raises(KeyError), amp.autocast():
                raise KeyError("inner")
            assert self.subject.casting() == outer
        assert self.subject.casting() == before

    @requires("regions")
    def test_a_region_does_not_outlive_its_session(self) -> None:
        """Where `shutdown` is called inside, casting is off after it: what was before the region was the session's."""
        for enabled in (True, False):
            amp = self.start()
            with amp.autocast(enabled=enabled):
                amp.shutdown()
            assert self.subject.casting() == self.outside
        amp = self.start()
        bench = self.bench(amp)
        with amp.scale_loss(bench.loss(), bench.opt):
            amp.shutdown()
        assert self.subject.casting() == self.outside

    @requires("regions")
    def test_a_region_leaves_the_session_that_begins_in_it(self) -> None:
        """Where `init` is called inside, its dtype holds after it, and not that of the session before."""
        for enabled in (True, False):
            for dtype in sorted(self.backend.capabilities.dtypes & self._usable()):
                with self.start().autocast(enabled=enabled):
                    self.start(dtype=dtype)
                assert self.subject.computes_in() == dtype
                ampx.shutdown()
                assert self.subject.casting() == self.outside

    @requires("regions")
    def test_regions_decorate_functions(self) -> None:
        """Every call runs inside; the module-level region looks its session up when it is entered."""
        off = ampx.autocast(enabled=False)(self.subject.computes_in)
        amp = self.start()
        on = amp.autocast()(off)

        @amp.autocast(enabled=False)
        def fails() -> None:
            raise KeyError(self.subject.computes_in())

        for _ in range(2):
            assert on() == "float32"
            with pytest.raises(KeyError, match="float32"):
                fails()
            assert self.subject.computes_in() == self.subject.dtype
        assert off.__name__ == "computes_in"

    @requires("regions")
    def test_regions_may_have_a_dtype_of_their_own(self) -> None:
        """`autocast(dtype=…)` computes in it inside, and an unknown one is refused at once."""
        amp = self.start()
        for dtype in sorted(self.backend.capabilities.dtypes & self._usable()):
            with amp.autocast(dtype=dtype):
                assert self.subject.computes_in() == dtype
            assert self.subject.computes_in() == self.subject.dtype
        unknown: Any = "int8"
        with refused(ampx.UnsupportedDtypeError, passed="'int8'", accepted="accepted: ", advice="Pass"):
            amp.autocast(dtype=unknown)

    @requires("op_lists")
    def test_op_lists_are_honoured(self) -> None:
        """A denied operation computes in float32; an entry that means nothing is refused."""
        self.start(deny=[self.subject.operation()])
        assert self.subject.computes_in() == "float32"
        self.start()
        assert self.subject.computes_in() == self.subject.dtype
        for option in ("allow", "deny"):
            with refused(ampx.UnsupportedOpError, passed="object", accepted="accepted: ", advice=""):
                self.start(**{option: [object()]})
            with refused(ampx.InvalidOptionError, passed=f"{option}='dot'", accepted="accepted: ", advice="Pass ["):
                self.start(**{option: "dot"})

    @requires("op_lists")
    def test_op_lists_are_checked_with_casting_off(self) -> None:
        """A good entry is accepted where nothing is cast; one that means nothing is refused all the same."""
        for off in ({"level": "O0"}, {"dtype": "float32"}):
            for option in ("allow", "deny"):
                self.start(**off, **{option: [self.subject.operation()]})
                assert self.subject.computes_in() == "float32"
                with refused(ampx.UnsupportedOpError, passed="object", accepted="accepted: ", advice=""):
                    self.start(**off, **{option: [object()]})

    def _usable(self) -> frozenset[Dtype]:
        device = self.backend.device(self.subject.device)
        return device.native | device.emulated
