"""All rules, by code: 1xx loss scaling, 2xx casting, 3xx values."""

from __future__ import annotations

from typing import Final

from . import casting, deprecated, scaling, values
from .problem import Rule

RULES: Final = (
    Rule(
        "AMP101",
        "clipping scaled gradients",
        "error",
        "Gradients carry the loss scale until they are divided. A bound of 1 on gradients that are 65536 times too "
        "large makes every step 65536 times too small.",
        "Divide first: scaler.unscale_(optimizer), then clip, then scaler.step(optimizer).",
        scaling.clipped_while_scaled,
    ),
    Rule(
        "AMP102",
        "scale moved between two steps",
        "error",
        "update() changes the scale. An optimizer that is stepped after it divides by the new scale what carries the "
        "old one: its gradients are twice or half of what they should be.",
        "Call update() once, after the last step of the pass.",
        scaling.updated_between_steps,
    ),
    Rule(
        "AMP103",
        "schedule or average moved on skipped steps",
        "warning",
        "Where gradients overflow the scaler skips the step, and the first steps of a run often are. The learning "
        "rate and the average of the weights move on all the same.",
        "Move them only where the step was applied: compare scaler.get_scale() before and after update(), or use "
        "ampx.gate.",
        scaling.moved_on_skipped_steps,
    ),
    Rule(
        "AMP104",
        "float16 without loss scaling",
        "error",
        "Gradients below 6e-8 are 0 in float16. Without a loss scale many of them are, and the model does not learn.",
        "Scale the loss with a GradScaler or with ampx, or cast to bfloat16.",
        scaling.float16_without_scaling,
    ),
    Rule(
        "AMP105",
        "loss scale not in the checkpoint",
        "warning",
        "A run that is resumed begins with the first scale, overflows and skips steps until the scale has come down.",
        "Save and load the state of the scaler beside that of the optimizer.",
        scaling.scale_not_saved,
    ),
    Rule(
        "AMP106",
        "gradients divided twice",
        "error",
        "unscale_() may be called once for each optimizer between two updates; a second call raises a RuntimeError.",
        "Call it once, after the last backward and before clipping.",
        scaling.unscaled_twice,
    ),
    Rule(
        "AMP107",
        "scale never updated",
        "error",
        "Without update() the scale never moves, an overflow is followed by the same overflow, and the second step of"
        " an optimizer raises.",
        "Call scaler.update() after the last step of each pass.",
        scaling.never_updated,
    ),
    Rule(
        "AMP108",
        "optimizer stepped past the scaler",
        "error",
        "optimizer.step() applies gradients as they are: with the loss scale in them, and with overflows.",
        "Call scaler.step(optimizer) and scaler.update().",
        scaling.stepped_by_itself,
    ),
    Rule(
        "AMP109",
        "unscaled loss beside a scaled one",
        "error",
        "The step divides all gradients by the scale, those of the unscaled loss, too: they count for nothing.",
        "Scale every loss whose gradients the step applies.",
        scaling.unscaled_beside_scaled,
    ),
    Rule(
        "AMP110",
        "scaler made in a loop",
        "error",
        "Each new scaler begins with its first scale and finds the right one anew, by skipping steps.",
        "Make the scaler once, before the loop.",
        scaling.made_in_a_loop,
    ),
    Rule(
        "AMP201",
        "backward in a casting region",
        "warning",
        "Backward computes each operation in the dtype of its forward. In a region its own operations may be cast "
        "again; the frameworks advise against it.",
        "End the region after the loss is computed.",
        casting.backward_in_a_region,
    ),
    Rule(
        "AMP202",
        "binary cross entropy of float16 probabilities",
        "error",
        "A probability near 0 or 1 is 0 or 1 in float16, and its logarithm infinite. torch raises in a region on a "
        "GPU.",
        "Use the loss that takes logits: binary_cross_entropy_with_logits, BCEWithLogitsLoss.",
        casting.bce_of_probabilities,
    ),
    Rule(
        "AMP203",
        "emulated bfloat16 taken for hardware",
        "warning",
        "torch.cuda.is_bf16_supported() is true wherever bfloat16 can be computed at all. On a T4 or V100 it is "
        "emulated.",
        "Pass including_emulation=False, or use ampx.init, whose dtype auto asks the device.",
        casting.emulated_bfloat16,
    ),
    Rule(
        "AMP204",
        "probabilities in float16",
        "warning",
        "Under the policy mixed_float16 a layer gives float16. Probabilities below 6e-8 are 0, and their logarithm is"
        " cut off.",
        'Give the last layer dtype="float32", or compute the loss from logits.',
        casting.softmax_in_float16,
    ),
    Rule(
        "AMP205",
        "deprecated name of torch.amp",
        "warning",
        "torch.cuda.amp and torch.cpu.amp are deprecated since PyTorch 2.4, and warn when they are called.",
        'Take the names from torch.amp, with the device: torch.amp.autocast("cuda"), torch.amp.GradScaler("cuda").',
        deprecated.old_names,
        default=False,
    ),
    Rule(
        "AMP301",
        "low-precision weights without float32 copies",
        "warning",
        "A weight in bfloat16 has 8 bits: an update smaller than 1/256 of it is lost. At usual learning rates most "
        "are.",
        "Keep weights in float32 and cast in a region, or use an optimizer with float32 copies (ampx: level O2).",
        values.weights_without_masters,
    ),
    Rule(
        "AMP302",
        "constant beyond float16",
        "error",
        "The largest float16 is 65504. A mask of -1e9 is refused by torch and infinite elsewhere, and a row of "
        "infinities has a softmax of NaN.",
        "Use torch.finfo(x.dtype).min or its like.",
        values.too_large,
    ),
    Rule(
        "AMP303",
        "epsilon that is 0 in float16",
        "error",
        "The least float16 is 6e-8. An epsilon of 1e-8 is 0 there, and guards no division and no logarithm.",
        "Use 1e-6 or more, or compute this in float32.",
        values.rounds_to_0,
    ),
    Rule(
        "AMP304",
        "squares, roots and logarithms of float16",
        "warning",
        "The square of 256 is infinite in float16, that of 1.7e-4 is 0, and so is a probability of 3e-8, whose "
        "logarithm is infinite. A region computes these in float32; a cast by hand does not.",
        "Cast to float32 before them and back after them, or leave casting to a region.",
        values.of_half,
    ),
)
BY_CODE: Final = {rule.code: rule for rule in RULES}
