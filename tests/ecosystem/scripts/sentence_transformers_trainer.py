"""SentenceTransformerTrainer: a tiny BERT with mean pooling, trained by cosine similarity."""

import json
import tempfile

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import CosineSimilarityLoss
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed

set_seed(0)
words = ["[PAD]", *(f"w{number}" for number in range(31))]
tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[PAD]"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
config = BertConfig(
    vocab_size=32,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=16,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
pairs = {
    "first": [f"w{number} w{number + 1}" for number in range(16)],
    "second": [f"w{number + 1} w{number + 2}" for number in range(16)],
    "score": [number % 2 for number in range(16)],
}
with tempfile.TemporaryDirectory() as folder:
    BertModel(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(folder)
    body = Transformer(folder, max_seq_length=8)
    model = SentenceTransformer(modules=[body, Pooling(16)], device="cpu")
    arguments = SentenceTransformerTrainingArguments(
        folder,
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    data = Dataset.from_dict(pairs)
    trainer = SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=CosineSimilarityLoss(model))
    trainer.train()
print(json.dumps([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))
