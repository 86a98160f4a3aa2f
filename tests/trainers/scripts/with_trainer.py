"""A script for Hugging Face Trainer that knows nothing of ampx: a tiny model from a config, accumulation, clipping."""

import json
import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


def main(precision="float32"):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None
    )
    config.loss_type = "ForCausalLM"
    model = GPT2LMHeadModel(config)
    dtypes = set()
    model.transformer.h[0].mlp.c_fc.register_forward_hook(lambda module, inputs, output: dtypes.add(str(output.dtype)))
    tokens = torch.randint(32, (32, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_grad_norm=1.0,
            learning_rate=0.01,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            fp16=precision == "float16",
            bf16=precision == "bfloat16",
        )
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.train()
    log = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "losses": [entry["loss"] for entry in log],
        "norms": [entry["grad_norm"] for entry in log],
        "dtypes": sorted(dtypes),
    }


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
