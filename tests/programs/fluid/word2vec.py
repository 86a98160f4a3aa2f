"""An N-gram language model on English text with a shared table of words, clipped gradients and mixed precision."""

import argparse
import json
import re
from pydoc_data import topics

import numpy as np
import paddle.fluid as fluid

EMBED_SIZE = 32
HIDDEN_SIZE = 64
N = 5

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=128)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--dict_size", type=int, default=500)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--use_amp", action="store_true")
args = parser.parse_args()


def read_words():
    text = " ".join(topics.topics[name] for name in sorted(topics.topics))
    words = re.findall("[a-z]+", text.lower())[:60000]
    names, counts = np.unique(words, return_counts=True)
    kept = names[np.argsort(-counts, kind="stable")][: args.dict_size - 1]
    index = {word: position + 1 for position, word in enumerate(kept)}
    return np.array([index.get(word, 0) for word in words], "int64")


def inference_program(words):
    embeddings = [
        fluid.layers.embedding(
            input=word, size=[args.dict_size, EMBED_SIZE], dtype="float32", is_sparse=False, param_attr="shared_w"
        )
        for word in words
    ]
    concat = fluid.layers.concat(input=embeddings, axis=1)
    hidden = fluid.layers.fc(input=concat, size=HIDDEN_SIZE, act="sigmoid")
    return fluid.layers.fc(input=hidden, size=args.dict_size, act="softmax")


def main():
    fluid.default_startup_program().random_seed = args.seed
    names = ["firstw", "secondw", "thirdw", "fourthw"]
    words = [fluid.layers.data(name=name, shape=[1], dtype="int64") for name in names]
    next_word = fluid.layers.data(name="nextw", shape=[1], dtype="int64")
    predict_word = inference_program(words)
    cost = fluid.layers.cross_entropy(input=predict_word, label=next_word)
    avg_cost = fluid.layers.mean(cost)
    optimizer = fluid.optimizer.AdamOptimizer(
        learning_rate=0.01, grad_clip=fluid.clip.GradientClipByGlobalNorm(clip_norm=0.5)
    )
    if args.use_amp:
        amp_lists = fluid.contrib.mixed_precision.AutoMixedPrecisionLists(custom_black_list={"softmax"})
        optimizer = fluid.contrib.mixed_precision.decorate(optimizer, amp_lists, init_loss_scaling=2.0**15)
    optimizer.minimize(avg_cost)

    place = fluid.CUDAPlace(0) if fluid.is_compiled_with_cuda() else fluid.CPUPlace()
    exe = fluid.Executor(place)
    exe.run(fluid.default_startup_program())
    corpus = read_words()
    rng = np.random.RandomState(args.seed)
    losses = []
    for step in range(args.steps):
        starts = rng.randint(0, len(corpus) - N, args.batch_size)
        grams = corpus[starts[:, None] + np.arange(N)]
        feed = {name: grams[:, position : position + 1] for position, name in enumerate([*names, "nextw"])}
        avg_cost_np = exe.run(fluid.default_main_program(), feed=feed, fetch_list=[avg_cost])
        losses.append(float(avg_cost_np[0]))
        if step % 50 == 49:
            print(f"Step {step + 1}: Average Cost {avg_cost_np[0][0]:f}")
    final = float(np.mean(losses[-50:]))
    print(f"final cost {final:f}")
    print(json.dumps({"losses": losses, "metric": final}))


if __name__ == "__main__":
    main()
