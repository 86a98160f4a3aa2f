"""Policy files: what `init` and `ampx run` take from them, and what they refuse."""

import pytest

import ampx
from ampx import session
from ampx.plugins import Registry
from ampx.policy import PolicyFile
from ampx.run import RunSettings
from toy import plugin

TEXT = """
schema = "ampx.policy/1"
framework = "toy"
dtype = "bf16"
loss_scale = 8.0
deny = ["product"]
"""


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    registry = Registry(entry_points=[])
    registry.register_plugin(plugin, "toy")
    monkeypatch.setattr(session, "default_registry", lambda: registry)
    yield
    ampx.shutdown()


@pytest.fixture
def file(tmp_path):
    """Return a function that writes a policy file."""

    def write(text=TEXT):
        path = tmp_path / "ampx.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_init_takes_framework_dtype_loss_scale_and_lists_from_the_file(file):
    amp = ampx.init(policy=file())
    assert (amp.framework, amp.effective.dtype, amp.effective.level) == ("toy", "bfloat16", "O1")
    assert amp.effective.loss_scale.init_scale == 8.0
    assert amp.plan.deny == ("product",)


def test_arguments_that_are_no_defaults_beat_the_file_and_lists_are_joined(file):
    amp = ampx.init("toy", dtype="float16", loss_scale=4.0, deny=["total", "product"], policy=str(file()))
    assert (amp.effective.dtype, amp.effective.loss_scale.init_scale) == ("float16", 4.0)
    assert amp.plan.deny == ("product", "total")


def test_what_a_policy_says_is_read_back_as_it_was_written(file):
    names = ("module:a.b", 'module:"quoted" \\ back', "module:ü\n")
    policy = PolicyFile("toy", "float16", "O1", "dynamic", ("mul",), names, {names[0]: "beyond\n65504"})
    text = policy.text()
    again = PolicyFile.read(file(text))
    assert (again.framework, again.dtype, again.loss_scale) == ("toy", "float16", "dynamic")
    assert (again.allow, again.deny) == (("mul",), names)
    assert '"module:a.b", # tune: beyond 65504\n' in text


def test_what_a_person_added_to_a_file_stays_when_it_is_measured_anew(file):
    reasons = {"dtype": "as fast", "module:a": "beyond 65504", "module:b": "beyond 65504"}
    first = PolicyFile("toy", "float16", "O1", "dynamic", (), ("module:a", "module:b"), reasons, enabled=False).text()
    edited = first.replace('dtype = "float16"', '# Ann: keep in step with the server\ndtype = "float16"').replace(
        "deny = [", "deny = [\n    \"total\", # our own sum\n    'product', # and product"
    )
    again = PolicyFile("toy", "bfloat16", "O1", "auto", (), ("module:b",), {"module:b": "lost digits"})
    path = file(again.text(edited.encode()))
    text = path.read_text()
    assert '# Ann: keep in step with the server\ndtype = "bfloat16"\n' in text
    assert '    "total", # our own sum\n    \'product\', # and product\n    "module:b", # tune: lost digits\n]' in text
    policy = PolicyFile.read(path)
    assert (policy.loss_scale, policy.enabled, policy.deny) == ("auto", True, ("total", "product", "module:b"))
    assert again.text(text.encode()) == text
    with pytest.raises(ampx.PolicyFileError, match=r"'mine\.toml' is no TOML"):
        again.text(b"deny = [", "mine.toml")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dtype = 'float16'\nlevels = 'O1'", "has levels, which no policy has; accepted: schema, framework"),
        ("deny = 'module:head'", "has deny = 'module:head'; accepted: a list of names"),
        ("deny = [1]", r"has deny = \[1\]"),
        ("dtype = 16", "has dtype = 16; accepted: text"),
        ("dtype = 'int8'", "cannot be honoured: dtype='int8'"),
        ("level = 'O7'", "cannot be honoured: level='O7'"),
        ("loss_scale = -1.0", "cannot be honoured"),
        ("enabled = 0", "has enabled = 0; accepted: true or false"),
        ("schema = 'ampx.policy/9'", "accepted: 'ampx.policy/1'"),
        ("dtype = ", "is no TOML"),
        ("framework = 'torch'", "is for 'torch', and 'toy' is what computes"),
    ],
)
def test_a_wrong_file_is_refused_and_the_session_stays(file, text, says):
    before = ampx.init("toy")
    with pytest.raises(ampx.PolicyFileError, match=says) as refused:
        ampx.init("toy", policy=file(text))
    assert "ampx.toml" in str(refused.value)
    assert ampx.current() is before


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ampx.PolicyFileError, match="cannot be read: No such file"):
        ampx.init("toy", policy=tmp_path / "none.toml")


def test_a_policy_that_is_off_switches_the_session_off_and_a_run_automates_nothing(file):
    text = PolicyFile("toy", "float32", "O0", reasons={"enabled": "float32 is the fastest"}, enabled=False).text()
    assert "enabled = false  # float32 is the fastest\n" in text
    path = file(text)
    amp = ampx.init(policy=path)
    assert (amp.enabled, amp.effective.dtype) == (False, None)
    assert not RunSettings().by_policy(path).automates
    assert "enabled" not in PolicyFile("toy").text()
    assert ampx.init(policy=file(text.replace("enabled = false", "enabled = true"))).enabled


def test_a_run_has_the_settings_of_the_file_where_it_has_its_defaults(file):
    path = file()
    settings = RunSettings().by_policy(path)
    assert (settings.dtype, settings.level, settings.loss_scale, settings.deny) == ("bfloat16", "O1", 8.0, ("product",))
    assert settings.policy == str(path)
    assert RunSettings(dtype="float16").by_policy(path).dtype == "float16"
