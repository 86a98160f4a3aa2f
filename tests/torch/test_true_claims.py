"""Scripts and models with one fault each, as users write them: what `ampx diagnose` claims of them is so.

The truth stands beside each. It was written before the tool was asked, from the arithmetic of the dtypes.
"""

import math

import pytest
import torch
from torch import nn

from ampx.numerics import report
from ampx.numerics.diagnose import diagnose
from ampx.numerics.diagnose_script import diagnose_script
from ampx.run import RunSettings
from ampx.run.page import ALARM
from ampx.run.program import Program
from planted_torch import Lambda, linear
from processes import run_here

HEAD = """
import torch
from torch import nn

torch.manual_seed(0)


class Energy(nn.Module):
    def forward(self, x):
        return x.square().mean(-1, keepdim=True).log1p()
"""

# Hidden state in float16 goes on into the next step. In step 4 the energy of one batch, about
# 1e7, is beyond float16.
STATEFUL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.project, self.energy = nn.LSTMCell(8, 16), nn.Linear(8, 8), Energy()
        self.head = nn.Linear(17, 1)

    def forward(self, x, state):
        h, c = self.cell(x, state)
        return self.head(torch.cat([h, self.energy(self.project(x))], -1)), (h, c)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = None
for step in range(6):
    x = torch.randn(4, 8) * (1e4 if step == 3 else 1.0)
    output, state = model(x, state)
    state = tuple(part.detach() for part in state)
    optimizer.zero_grad()
    output.float().square().mean().backward()
    optimizer.step()
"""

# What the generator makes in one step its own optimizer uses in the next.
GAN = """
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), Energy())
of_critic = torch.optim.SGD(critic.parameters(), lr=0.01)
of_generator = torch.optim.SGD(generator.parameters(), lr=0.01)
for step in range(4):
    fake = generator(torch.randn(8, 4))
    if step == 2:
        fake = fake * 2e4
    of_critic.zero_grad()
    (critic(torch.randn(8, 8)).float().mean() - critic(fake.detach() * 0).float().mean()).backward()
    of_critic.step()
    of_generator.zero_grad()
    critic(fake).float().square().mean().backward()
    of_generator.step()
"""

# Memory that an initializer overwrites holds anything, such as 2e38. The weights of the second layer are zero, and 0/0
# is NaN in every precision.
INITIALIZED = """
class Ratio(nn.Module):
    def forward(self, x):
        return x / x.abs().sum(-1, keepdim=True)


model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Ratio())
with torch.no_grad():
    model[0].weight.fill_(2e38).uniform_(-0.1, 0.1)
    nn.init.zeros_(model[1].weight)
    nn.init.zeros_(model[1].bias)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).float().mean().backward()
    optimizer.step()
"""

# The gradient of a norm at zero is 0/0 inside of PyTorch, which masks it: float32 trains. 9e8 is beyond float16.
MASKED_INSIDE = """
model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU())
energy = Energy()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(3):
    x = torch.randn(4, 8)
    x[0] = 0
    output = model(x)
    optimizer.zero_grad()
    (output.norm(dim=-1).float().mean() + energy(output * (1e5 if step == 2 else 1.0)).float().mean()).backward()
    optimizer.step()
"""

# Gradient descent on a quadratic, 2.1 over the largest step that converges: weights double and change sign every step,
# in any precision. float16 cannot hold what comes of them first.
EXPLODES = """
model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
optimizer = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=DECAY)
x = torch.randn(64, 8)
for step in range(60):
    optimizer.zero_grad()
    model(x).float().square().mean().backward()
    optimizer.step()
"""

# In bfloat16 nothing is scaled, so that no scale backs off: a step whose gradients are NaN is a fault. The root's slope
# at zero is infinite, and 0 * inf is NaN.
SKIPS = """
class Gate(nn.Module):
    def forward(self, x):
        return x + (x * 0).sqrt()


model = nn.Sequential(nn.Linear(8, 8), Gate(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).float().square().mean().backward()
    optimizer.step()
"""

# A row of padding only: softmax of nothing but -inf is NaN in every precision; the data has neither inf nor NaN.
MASKED_ROW = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x, padding):
        scores = self.project(x) @ x.transpose(-1, -2)
        MASK
        return torch.softmax(scores, -1) @ x


model = Attention()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    padding = torch.zeros(4, 6, dtype=torch.bool)
    padding[1] = step == 2
    optimizer.zero_grad()
    model(torch.randn(4, 6, 8), padding).float().square().mean().backward()
    optimizer.step()
"""
FILLED = "scores = scores.masked_fill(padding[:, None], float('-inf'))"
ADDED = "scores = scores + torch.zeros(4, 1, 6).masked_fill(padding[:, None], float('-inf')).to(scores.dtype)"


# The script casts to half by itself, in any run. 300**2 is beyond float16, and x / inf is 0.
BY_HAND = """
class Normed(nn.Module):
    def forward(self, x):
        x = x.half()
        return x / x.square().sum(-1, keepdim=True).sqrt()


model, normed = nn.Linear(4, 4), Normed()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    optimizer.zero_grad()
    normed(model(torch.randn(8, 4)) + SIZE).float().mean().backward()
    optimizer.step()
"""

# Squares of differences of points that are 60 from zero, expanded: 8 * 60**2 is 28,800, of which float16 holds every
# sixteenth number, and the differences are below 16. Far from zero, in its norm, the nearest point is right.
EXPANDED = """
class Nearest(nn.Module):
    def __init__(self):
        super().__init__()
        self.points = nn.Parameter(torch.randn(64, 8) + OFFSET)

    def forward(self, z):
        points = self.points.to(z.dtype)
        distances = z.square().sum(1, keepdim=True) - 2 * z @ points.T + points.square().sum(1)
        return points[distances.argmin(1)]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.nearest = nn.Linear(8, 8), Nearest()

    def forward(self, x):
        z = self.encode(x) + OFFSET
        return z, self.nearest(z)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
x = torch.randn(32, 8)
for step in range(4):
    optimizer.zero_grad()
    z, nearest = model(x)
    (z - nearest).float().square().mean().backward()
    optimizer.step()
"""

# The gradients of the first loss bound the loss scale; those of the second, 1e-9 of it, are zero at that scale.
TWO_LOSSES = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        return self.large(x), self.small(x)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
x = torch.randn(32, 8)
for step in range(6):
    optimizer.zero_grad()
    large, small = model(x)
    (3e4 * large.float().square().mean() + SMALL * small.float().square().mean()).backward()
    optimizer.step()
"""

# Each step aims at 1.5 times what the step before returned: in float32 as well the loss and the weights explode.
BOOTSTRAPPED = """
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
x = torch.randn(32, 6)
for step in range(14):
    with torch.no_grad():
        target = 1 + 1.5 * model(x.flip(0))
    optimizer.zero_grad()
    (model(x) - target).float().square().mean().backward()
    optimizer.step()
"""

# 1 - sigmoid(12) is 6e-6, and float16 rounds the sigmoid to 1: the loss of a wrong answer is 100 in place of 12, and
# the gradient of that is beyond float16.
SURE = """
model = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
with torch.no_grad():
    model[0].weight.mul_(0.01)
    model[0].bias.fill_(12.0)
criterion = nn.BCELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for step in range(4):
    optimizer.zero_grad()
    criterion(model(torch.randn(8, 4)), torch.zeros(8, 1)).backward()
    optimizer.step()
"""

# Of a row of equal numbers the deviation is 0, and all that it is divided by is 1e-8, which float16 does not have.
STANDARDIZED = """
class Standardize(nn.Module):
    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-8)


model = nn.Sequential(nn.Linear(8, 8, bias=False), Standardize(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    x = torch.randn(4, 8)
    x[0] = 0
    optimizer.zero_grad()
    model(x).float().square().mean().backward()
    optimizer.step()
"""

# The exponential of 13 is beyond float16.
SOFTPLUS = """
class Softplus(nn.Module):
    def forward(self, x):
        return torch.log(1 + torch.exp(x))


model = nn.Sequential(nn.Linear(8, 4), Softplus(), nn.Linear(4, 1))
nn.init.constant_(model[0].bias, 13.0)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(4):
    optimizer.zero_grad()
    (100 * model(torch.randn(16, 8)).float().square()).mean().backward()
    optimizer.step()
"""

# A part of the model is called before the model is. The state is 4 times larger in every step: in the eighth it is
# beyond float16.
PART_FIRST = """
class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Linear(8, 16)

    def forward(self, x, state):
        return self.read(x) + 6.0 * state


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.norm, self.out = Counter(), nn.LayerNorm(16), nn.Linear(16, 1)

    def forward(self, x, state):
        state = self.cell(x, state)
        return self.out(self.norm(state)), state


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
x = torch.randn(8, 8)
state = torch.zeros(8, 16, dtype=model.cell.read(x).dtype)
for step in range(10):
    optimizer.zero_grad()
    output, state = model(x, state.detach())
    output.float().square().mean().backward()
    optimizer.step()
"""

# Numbers next to 0.02 in bfloat16 are 1.2e-4 apart: a step of 1e-6 is rounded away.
ROUNDED_AWAY = """
model = nn.Linear(64, 8).to(DTYPE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(8, 64).to(DTYPE)).float().square().mean().backward()
    optimizer.step()
"""


@pytest.fixture
def asked(tmp_path):
    """Return a function that diagnoses a script in this process."""

    def ask(text, dtype="float16", loss_scale=None, **options):
        (tmp_path / "train.py").write_text(HEAD + text)
        settings = RunSettings(dtype, device="cpu", loss_scale=loss_scale)
        program = Program(str(tmp_path / "train.py"))
        return diagnose_script(program, settings, framework="torch", run=lambda t: run_here(t, tmp_path), **options)

    return ask


def test_state_that_crosses_steps_is_no_failure_of_float32(asked):
    diagnosis, result = asked(STATEFUL)
    assert (result["step"], diagnosis.kind, diagnosis.first_nonfinite.module) == (4, "overflow", "energy")
    assert not diagnosis.float32_fails


def test_a_script_whose_optimizers_take_turns_is_compared_with_itself_in_float32(asked):
    diagnosis, _ = asked(GAN)
    assert (diagnosis.kind, diagnosis.float32_fails) == ("overflow", False)
    assert diagnosis.first_nonfinite.module.endswith("3")


def test_what_an_initializer_finds_in_memory_is_no_data(asked):
    diagnosis, result = asked(INITIALIZED)
    assert (result["step"], diagnosis.kind, diagnosis.first_nonfinite.module) == (1, "division", "2")
    assert diagnosis.float32_fails


def test_what_a_framework_masks_in_its_backward_is_no_failure_of_float32(asked):
    diagnosis, _ = asked(MASKED_INSIDE)
    assert (diagnosis.kind, diagnosis.float32_fails) == ("overflow", False)


@pytest.mark.parametrize("mask", [FILLED, ADDED], ids=["filled", "added"])
def test_a_row_that_is_masked_whole_is_no_data(asked, mask):
    diagnosis, result = asked(MASKED_ROW.replace("MASK", mask))
    assert (result["step"], diagnosis.kind, diagnosis.float32_fails) == (3, "mask", True)
    assert diagnosis.first_nonfinite.operation == "_softmax"


@pytest.mark.parametrize(("rate", "decay"), [("8.0", "0.0"), ("0.1", "40.0")], ids=["rate", "decay"])
def test_weights_that_explode_are_no_overflow_of_a_module(asked, rate, decay):
    diagnosis, _ = asked(EXPLODES.replace("LR", rate).replace("DECAY", decay))
    assert diagnosis.kind == "learning rate", str(diagnosis)
    assert diagnosis.precision_is_innocent
    assert "deny" not in diagnosis.advice


def test_in_bfloat16_a_skipped_step_is_a_fault(asked):
    diagnosis, result = asked(SKIPS, dtype="bfloat16")
    assert (result["step"], result["fault"]) == (1, "skipped")
    assert (diagnosis.kind, diagnosis.float32_fails, diagnosis.first_nonfinite.module) == ("logarithm", True, "1")


def test_what_the_script_casts_by_hand_is_not_compared_and_an_overflow_there_is_named(asked):
    diagnosis, result = asked(BY_HAND.replace("SIZE", "300.0"))
    assert (diagnosis.kind, diagnosis.first_nonfinite.operation, diagnosis.float32_fails) == ("overflow", "pow", False)
    assert "the script itself casts" in diagnosis.why
    assert diagnosis.experiments == ()
    assert "may cure it" in diagnosis.advice
    healthy, result = asked(BY_HAND.replace("SIZE", "3.0"))
    assert healthy is None
    assert "every module agrees" not in result["verdict"]
    assert "casts to float16" in result["verdict"]


def test_a_loss_that_is_wrong_is_no_agreement_though_outputs_are_right_in_their_norm(asked):
    diagnosis, _ = asked(EXPANDED.replace("OFFSET", "60.0"))
    assert (diagnosis.kind, diagnosis.first_nonfinite.module) == ("digits", "nearest")
    assert "deny=['module:nearest']" in diagnosis.advice
    healthy, result = asked(EXPANDED.replace("OFFSET", "0.0"))
    assert healthy is None, result["verdict"]


def test_a_scale_at_which_other_gradients_are_zero_cures_nothing(asked):
    diagnosis, _ = asked(TWO_LOSSES.replace("SMALL", "3e-9"))
    assert (diagnosis.kind, diagnosis.first_nonfinite.module) == ("flush", "small")
    assert "small.weight" in diagnosis.why
    assert "deny=['module:small']" in diagnosis.advice
    assert diagnosis.experiments[-1].cures
    settles, _ = asked(TWO_LOSSES.replace("SMALL", "3e4"))
    assert settles.kind == "loss scale"


def test_a_training_that_diverges_is_no_overflow_where_only_gradients_overflow(asked):
    diagnosis, _ = asked(BOOTSTRAPPED)
    assert diagnosis.kind == "learning rate", str(diagnosis)


def test_a_loss_that_is_wrong_is_asked_about_before_gradients_that_overflow(asked):
    diagnosis, _ = asked(SURE)
    assert (diagnosis.kind, diagnosis.first_nonfinite.module) == ("digits", "1"), str(diagnosis)
    assert "deny=['module:1']" in diagnosis.advice


def test_an_epsilon_that_the_dtype_has_not_is_not_put_down_to_a_difference(asked):
    diagnosis, _ = asked(STANDARDIZED)
    assert (diagnosis.kind, diagnosis.first_nonfinite.module) == ("epsilon", "1")


def test_the_picture_shows_what_every_module_needs_and_marks_the_one_that_fails(asked):
    _, result = asked(SOFTPLUS)
    (axes,) = report._draw_ranges(result).axes
    *rows, smallest, largest = axes.get_lines()
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["0", "1", "2", "the model"]
    assert [row.get_color() == ALARM for row in rows] == [False, True, False, False]
    assert [line.get_xdata()[0] for line in (smallest, largest)] == [2.0**-24, 65504.0]
    needs = dict(zip(names, (row.get_xdata() for row in rows), strict=True))
    assert 11 < needs["0"][1] < 20  # 13 and what weights below 0.36 add: its exponential is beyond float16, not itself
    assert result["modules"][0]["float32"]["largest"] == needs["0"][1]


def test_a_change_is_tried_at_a_loss_scale_that_the_gradients_fit(asked):
    diagnosis, _ = asked(SOFTPLUS)
    assert [entry.cures for entry in diagnosis.experiments] == [True], str(diagnosis)
    assert diagnosis.advice.splitlines() == [
        "amp = ampx.init(dtype='float16', deny=['module:1'])  # keep it in float32",
        "model = amp.prepare(model)  # which has that module, before wrap_optimizer",
    ]


def test_a_module_has_the_same_name_in_all_runs_though_a_part_of_it_was_called_before(asked):
    diagnosis, _ = asked(PART_FIRST)
    assert (diagnosis.kind, diagnosis.first_nonfinite.module) == ("overflow", "cell")
    assert "deny=['module:cell']" in diagnosis.advice


def test_a_module_is_tried_in_the_model_that_fails_though_the_models_were_called_in_another_order(asked):
    swapped = GAN.replace("for step in range(4):", "critic(torch.randn(1, 8))\nfor step in range(4):")
    diagnosis, _ = asked(swapped)
    assert diagnosis.experiments[-1].cures, str(diagnosis)
    assert "deny=['module:3']" in diagnosis.advice


@pytest.mark.filterwarnings("ignore:the optimizer holds:ampx.PrecisionWarning")
@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float32"])
def test_updates_that_weights_in_bfloat16_lose_are_told(asked, dtype):
    diagnosis, result = asked(ROUNDED_AWAY.replace("DTYPE", dtype), dtype="bfloat16")
    assert diagnosis is None
    notes = [note for note in result["notes"] if "of the updates of weights in bfloat16 were rounded away" in note]
    assert len(notes) == (dtype == "torch.bfloat16")
    assert ("every module agrees" in result["verdict"]) == (dtype == "torch.float32")


class Norm(nn.Module):
    """Divide by the root of the sum of squares, which is beyond float16."""

    def forward(self, x):
        return x / x.square().sum(-1, keepdim=True).sqrt()


def test_a_value_that_overflows_forward_is_not_put_down_to_the_loss_scale():
    model = nn.Sequential(linear(8, 1.0), Norm(), linear(8, 1.0), Lambda(lambda x: x * 1e3 + 1e3))
    batch = torch.full((4, 8), 300.0)  # 8 * 300**2 is 7e5
    diagnosis = diagnose(lambda m: m(batch).float().sum(), model, dtype="float16", device="cpu", loss_scale=2.0**16)
    assert (diagnosis.kind, diagnosis.first_nonfinite.module) in (("overflow", "1"), ("sum", "1"))
    assert "as it should" not in str(diagnosis)


class Classifier(nn.Module):
    """A sigmoid, and the cross entropy of what comes out. 1 - sigmoid(9) is 1.2e-4, and float16 rounds it to 0."""

    def __init__(self):
        super().__init__()
        self.head, self.pos = linear(8, 1.0), Lambda(torch.sigmoid)
        self.out = Lambda(lambda p: -(1 - p).log().clamp(min=-100))

    def forward(self, x):
        return self.out(self.pos(self.head(x)))


def test_digits_are_missed_where_they_were_lost():
    batch = torch.linspace(8.5, 9.5, 32).reshape(4, 8)
    diagnosis = diagnose(lambda m: m(batch).float().mean(), Classifier(), dtype="float16", device="cpu")
    assert diagnosis.first_nonfinite.module == "pos", str(diagnosis)
    assert "deny=['module:pos']" in diagnosis.advice
    assert "first non-finite" not in str(diagnosis)


def test_an_infinity_that_does_no_harm_is_told_with_its_module(asked):
    text = """
class Scaled(nn.Module):
    def forward(self, x):
        return x * torch.arange(1, 513).to(x.dtype) * 314.0


model = nn.Sequential(nn.Linear(4, 512), Scaled(), nn.Tanh())
nn.init.zeros_(model[0].weight)
nn.init.ones_(model[0].bias)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).float().mean().backward()
    optimizer.step()
"""
    diagnosis, result = asked(text, loss_scale=1.0)
    assert diagnosis is None
    assert "every module agrees" not in result["verdict"]
    (risk,) = (risk for risk in result["risks"] if risk["kind"] == "overflow")
    assert risk["where"] == ["1"]
    assert "608 of 1024" in risk["text"]


def test_a_sample_is_drawn_across_the_columns(asked):
    text = """
class Positions(nn.Module):
    def forward(self, x):
        late = torch.arange(x.shape[-1]) % 4 == 1
        return torch.where(late, torch.sin(x * 0 + 1001.7), x * 0.1)


model = nn.Sequential(nn.Linear(4, 64), Positions(), nn.Tanh())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(16, 4)).float().square().mean().backward()
    optimizer.step()
"""
    diagnosis, result = asked(text, dtype="bfloat16")
    assert "every module agrees" not in result["verdict"]
    assert diagnosis is not None, result["verdict"]
    assert diagnosis.first_nonfinite.module == "1"


def test_values_that_are_finite_are_not_called_nonfinite():
    """1e-9 is zero in float16, whose smallest number is 6e-8."""
    model = nn.Sequential(linear(8, 1.0), Lambda(lambda x: x.float() * 1e9))
    batch = torch.full((4, 8), 1e-9)
    diagnosis = diagnose(lambda m: m(batch).float().mean() * 1e-9, model, dtype="float16", device="cpu")
    assert (diagnosis.kind, diagnosis.first_nonfinite.module) == ("flush", "0")
    assert math.isfinite(diagnosis.loss)
    assert "non-finite" not in str(diagnosis)
    assert "first wrong:" in str(diagnosis)
