"""SFTTrainer of TRL on a tiny GPT-2, with a tokenizer of 32 words."""

import json
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

set_seed(0)
words = ["<pad>", "<eos>", *(f"w{number}" for number in range(30))]
tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1)
texts = [" ".join(f"w{(start + step) % 30}" for step in range(8)) for start in range(32)]
with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        folder,
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        logging_steps=1,
        max_length=16,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    data = Dataset.from_dict({"text": texts})
    trainer = SFTTrainer(GPT2LMHeadModel(config), arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
print(json.dumps([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))
