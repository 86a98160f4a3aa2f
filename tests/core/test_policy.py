import itertools

import pytest

from ampx import Policy, UnsupportedDtypeError, UnsupportedLevelError
from ampx.policy import find_level, normalise_dtype

DTYPES = ("float16", "bfloat16", "float32")


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES, repeat=3)))
def test_str_and_parse_are_inverse(dtypes):
    policy = Policy(*dtypes)
    assert Policy.parse(str(policy)) == policy
    assert str(policy) == "param={},compute={},output={}".format(*dtypes)


@pytest.mark.parametrize(
    ("text", "dtypes"),
    [
        ("mixed_float16", ("float32", "float16", "float32")),
        ("16-mixed", ("float32", "float16", "float32")),
        ("mixed_bfloat16", ("float32", "bfloat16", "float32")),
        ("bf16-mixed", ("float32", "bfloat16", "float32")),
        ("16-true", ("float16", "float16", "float16")),
        ("bf16-true", ("bfloat16", "bfloat16", "bfloat16")),
        ("32-true", ("float32", "float32", "float32")),
        ("p=f32,c=f16,o=f32", ("float32", "float16", "float32")),
        (" compute = bf16 ", ("float32", "bfloat16", "float32")),
        ("Mixed_Float16", ("float32", "float16", "float32")),
    ],
)
def test_presets_and_short_forms(text, dtypes):
    assert Policy.parse(text) == Policy(*dtypes)


@pytest.mark.parametrize("text", ["", "float16", "p=int8", "q=f16", "p:f16", "p=f16,", "8-mixed", "c=f16,c=bf16"])
def test_an_unreadable_policy_is_refused(text):
    with pytest.raises(UnsupportedDtypeError):
        Policy.parse(text)


class Named:
    def __init__(self, name):
        self.name = name


class Spelled:
    def __init__(self, text):
        self.text = text

    def __repr__(self):
        return self.text


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("fp16", "float16"),
        ("half", "float16"),
        ("F16", "float16"),
        ("bf16", "bfloat16"),
        ("float", "float32"),
        ("fp32", "float32"),
        ("torch.bfloat16", "bfloat16"),
        (Named("float16"), "float16"),  # tf.float16, numpy dtypes
        (Spelled("torch.float16"), "float16"),
        (type("bfloat16", (), {}), "bfloat16"),  # jnp.bfloat16 is a class
    ],
)
def test_dtypes_are_normalised(dtype, expected):
    assert normalise_dtype(dtype) == expected


@pytest.mark.parametrize("dtype", ["float64", "int8", "", "auto", None, 16, float, Spelled("torch.int32")])
def test_other_dtypes_are_refused(dtype):
    if dtype is float:  # Python's float names float32's alias; it is 64 bits wide and still means "full precision"
        assert normalise_dtype(dtype) == "float32"
        return
    with pytest.raises(UnsupportedDtypeError, match="accepted"):
        normalise_dtype(dtype)


@pytest.mark.parametrize(
    ("name", "casts_ops", "casts_params", "master_weights", "scales_loss", "policy"),
    [
        ("O0", False, False, False, False, ("float32", "float32", "float32")),
        ("O1", True, False, False, True, ("float32", "float16", "float32")),
        ("O2", False, True, True, True, ("float16", "float16", "float32")),
        ("O3", False, True, False, False, ("float16", "float16", "float32")),
    ],
)
def test_levels(name, casts_ops, casts_params, master_weights, scales_loss, policy):
    level = find_level(name)
    assert (level.casts_ops, level.casts_params) == (casts_ops, casts_params)
    assert (level.master_weights, level.scales_loss) == (master_weights, scales_loss)
    assert level.policy("float16") == Policy(*policy)


@pytest.mark.parametrize("name", ["O4", "o1", "", 1, None, ["O1"]])
def test_unknown_levels_are_refused(name):
    with pytest.raises(UnsupportedLevelError, match="accepted: 'O0'"):
        find_level(name)
