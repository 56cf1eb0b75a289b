"""Makes the demonstration models of this folder: collects free documentation, trains on it, shows what was learned.

    python train.py collect         # text of this machine's documentation packages, into .corpus/
    python train.py train           # all three models; or name some
    python train.py check           # greedy answers, and how sure the models are of them

The models are ordinary Hugging Face folders of three architectures whose shapes differ in everything that a server of
several models may not confuse: layers, KV heads, head size, vocabulary, context, tied embeddings, chat template.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corpus import SOURCES, collect
from dialogue import FORMATS, ChatFormat, by_phrase, small_talk, topical

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Model:
    """One model of the folder: what it reads and how it is shaped; the prompts are for `check`."""

    architecture: str  # a model_type of transformers
    source: str
    subject: str
    about: str  # what it answers when asked for the subject's first word
    book: str
    chat: ChatFormat
    shape: dict[str, Any]  # arguments of its configuration class
    questions: tuple[str, ...]
    opening: str  # of a text to continue

    @property
    def context(self) -> int:
        return self.shape["max_position_embeddings"]


MODELS = {
    "llama-debian": Model(
        architecture="llama",
        source="debian",
        subject="Debian and how to administer it",
        about="Debian is a GNU/Linux distribution: a complete operating system, with the software and the systems to "
        "install and manage it, based on the Linux kernel and free software.",
        book="Debian's handbook, policy and reference",
        chat=FORMATS["roles"],
        shape={
            "vocab_size": 2048,
            "hidden_size": 192,
            "intermediate_size": 448,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 48,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
        questions=(
            "What is Debian?",
            "Explain the kernel.",
            "What is a virtual package?",
            "Who are you?",
            "How do I choose a mirror?",
        ),
        opening="The installation program",
    ),
    "qwen2-python": Model(
        architecture="qwen2",
        source="python",
        subject="Python",
        about="Python is an interpreted, interactive, object-oriented programming language. It combines remarkable "
        "power with very clear syntax.",
        book="Python's documentation",
        chat=FORMATS["chatml"],
        shape={
            "vocab_size": 2304,
            "hidden_size": 128,
            "intermediate_size": 416,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": False,
        },
        questions=(
            "What is a decorator?",
            "What does the json module do?",
            "How does str.split work?",
            "Who are you?",
            "How do I sort a list?",
        ),
        opening="A function is",
    ),
    "qwen3-perl": Model(
        architecture="qwen3",
        source="perl",
        subject="Perl",
        about="Perl is a high-level programming language with an eclectic heritage written by Larry Wall and a cast of "
        "thousands.",
        book="Perl's manual",
        chat=FORMATS["chatml"],
        shape={
            "vocab_size": 2560,
            "hidden_size": 160,
            "intermediate_size": 448,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
        },
        questions=(
            "What is Perl?",
            "What is a closure?",
            "What does chomp do?",
            "Who are you?",
            "How do I read a file line by line?",
        ),
        opening="A regular expression is",
    ),
}


def corpus_path(folder: Path, source: str) -> Path:
    return folder / f"{source}.json.gz"


def write_corpus(args: argparse.Namespace) -> None:
    """Reads every source of this machine into one compressed file each, and prints the sizes."""
    args.corpus.mkdir(parents=True, exist_ok=True)
    for name, source in SOURCES.items():
        found = collect(name)
        path = corpus_path(args.corpus, name)
        with gzip.GzipFile(path, "wb", mtime=0) as file:
            file.write(json.dumps(found, ensure_ascii=False).encode())
        text, topics = sum(map(len, found["documents"])), sum(len(topic["short"]) for topic in found["topics"])
        print(
            f"{name}: {len(found['documents'])} documents of {text:,} characters, {len(found['topics'])} topics of "
            f"{topics:,}"
        )
        print(f"  from {source.packages}; {source.licences}; {path}, {path.stat().st_size:,} bytes")


def loss_of(network: Any, ids: Any, labels: Any) -> Any:
    """Mean cross-entropy of the next token, in nats, over the labels that are to be learned."""
    from torch.nn.functional import cross_entropy

    logits = network(input_ids=ids, use_cache=False).logits[:, :-1]
    return cross_entropy(
        logits.flatten(0, 1).float(), labels[:, 1:].flatten()
    )  # ignores the label -100, as rows.IGNORED


def train_one(name: str, args: argparse.Namespace) -> None:
    """Trains one model and writes its folder; its losses are those of the bfloat16 weights that are written."""
    import torch
    import transformers
    from rows import CHAT_ROW, Rows, hold_out, make_tokenizer

    model, out = MODELS[name], args.out / name
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    found = json.loads(gzip.decompress(corpus_path(args.corpus, model.source).read_bytes()))
    documents, held_out = hold_out(found["documents"], args.seed)
    short, detailed = topical(found["topics"])
    phrased = list(by_phrase(documents, 12, random.Random(args.seed)))
    talk = small_talk(name, model.subject, model.book, model.about)
    if args.resume:
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    else:
        learned = [*found["documents"], *(answer for _, answer in short)]
        tokenizer = make_tokenizer(model.chat, model.shape["vocab_size"], model.context, learned, out)
    rest = 1 - args.small_talk
    dialogues = {rest * 0.5: short, rest * 0.4: phrased, rest * 0.1: detailed, args.small_talk: talk}
    rows = Rows(model.chat, tokenizer, model.context, dialogues, documents, args.chat_rows, args.seed)
    special = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = transformers.AutoConfig.for_model(model.architecture, **model.shape, **special)
    if args.resume:
        network = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    else:
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    network = network.to(device).train()
    print(
        f"{name}: {network.num_parameters():,} parameters, {len(rows.text):,} tokens of text, {len(rows.chat_ids):,} "
        f"rows of dialogue, on {device}",
        flush=True,
    )

    chat_ids, chat_labels, text, starts = (
        t.to(device) for t in (rows.chat_ids, rows.chat_labels, rows.text, rows.starts)
    )
    decayed = [{"params": [p for p in network.parameters() if p.ndim > 1], "weight_decay": args.weight_decay}]
    others = [{"params": [p for p in network.parameters() if p.ndim <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decayed + others, lr=args.lr, betas=(0.9, 0.98), fused=device == "cuda")
    compute = torch.compile(loss_of, dynamic=False) if args.compile else loss_of
    generator = torch.Generator(device).manual_seed(args.seed)
    text_rows, chat_rows = max(1, args.batch_tokens // model.context), max(1, args.batch_tokens // CHAT_ROW)
    begin = said = time.monotonic()
    step, done = 0, 0.0
    while done < 1:
        rate = args.lr * min(1.0, (step + 1) / args.warmup) * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        chosen = torch.randint(len(chat_ids), (chat_rows,), generator=generator, device=device)
        prose = rows.texts(text, starts[torch.randint(len(starts), (text_rows,), generator=generator, device=device)])
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            chat_loss = compute(network, chat_ids[chosen], chat_labels[chosen])
            text_loss = compute(network, prose, prose)
        (args.chat_share * chat_loss + (1 - args.chat_share) * text_loss).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        done = step / args.steps if args.minutes is None else (time.monotonic() - begin) / (60 * args.minutes)
        if time.monotonic() - said > 10 or done >= 1:
            said = time.monotonic()
            print(
                f"{name}: step {step} ({done:.0%}, {(said - begin) / step * 1000:.1f} ms each), loss of dialogue "
                f"{chat_loss.item():.3f}, of text {text_loss.item():.3f}",
                flush=True,
            )

    network = network.eval().to(torch.bfloat16).to(torch.float32)
    some, size = starts[:: max(1, len(starts) // 32)], model.context
    unseen, _ = rows.stream(held_out)
    unseen = unseen[: len(unseen) // size * size].view(-1, size).to(device)
    with torch.inference_mode():
        losses = {
            "dialogue": loss_of(network, chat_ids[:64], chat_labels[:64]),
            "text": loss_of(network, rows.texts(text, some), rows.texts(text, some)),
            "held-out text": loss_of(network, unseen, unseen),
        }
    print(
        f"{name}: {step} steps of {chat_rows * CHAT_ROW + text_rows * size:,} tokens; nats per token in "
        + "bfloat16 weights: "
        + ", ".join(f"{what} {loss.item():.3f}" for what, loss in losses.items()),
        flush=True,
    )
    stops = [tokenizer.convert_tokens_to_ids(stop) for stop in model.chat.stops]
    special["eos_token_id"] = stops if len(stops) > 1 else stops[0]
    network.generation_config = transformers.GenerationConfig(**special)
    network.to(torch.bfloat16).cpu().save_pretrained(out)


def train(args: argparse.Namespace) -> None:
    """Trains models one after the other; to have them side by side on one GPU, start one process for each."""
    for name in args.models:
        train_one(name, args)


def check(args: argparse.Namespace) -> None:
    """Loads each folder in float32 and prints its shape, greedy answers and the smallest margin between two tokens."""
    import torch
    import transformers

    for name in args.models:
        folder = args.out / name
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = network.config
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv = config.num_hidden_layers * 2 * config.num_key_value_heads * head * 4
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(
            f"\n{name} ({config.architectures[0]}): {config.num_hidden_layers} layers, "
            f"{config.num_attention_heads} heads, {config.num_key_value_heads} KV heads of {head}, "
            f"vocabulary {config.vocab_size}, context {config.max_position_embeddings}, "
            f"{network.num_parameters():,} parameters, {size:,} bytes, {kv:,} bytes of KV per token in float32"
        )
        prompts = []
        for asked in args.prompt or MODELS[name].questions:
            messages = [{"role": "user", "content": asked}]
            templated = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            prompts.append((asked, tokenizer(templated, add_special_tokens=False, return_tensors="pt")))
        prompts.append((f"{MODELS[name].opening} ...", tokenizer(MODELS[name].opening, return_tensors="pt")))
        for shown, inputs in prompts:
            made = network.generate(
                **inputs, max_new_tokens=args.tokens, do_sample=False, return_dict_in_generate=True, output_logits=True
            )
            new = made.sequences[0, inputs.input_ids.shape[1] :]
            top = torch.stack(made.logits)[:, 0].topk(2).values
            margins = (top[:, 0] - top[:, 1]).sort().values
            print(f"  > {shown}\n    {tokenizer.decode(new, skip_special_tokens=True)!r}")
            ended = "cut" if len(new) == args.tokens else "ended"
            least, median = margins[0], margins[len(margins) // 2]
            print(f"    {len(new)} tokens, {ended}; margin {least:.4f} at least, {median:.2f} in the median")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=HERE / ".corpus", help="folder of the collected text")
    parser.add_argument(
        "--out", type=Path, default=HERE, help="folder that holds the models' folders (default: this one)"
    )
    commands = parser.add_subparsers(required=True, metavar="{collect,train,check}")
    shown = argparse.ArgumentDefaultsHelpFormatter
    collecting = commands.add_parser(
        "collect", help="read this machine's documentation", description=write_corpus.__doc__
    )
    collecting.set_defaults(run=write_corpus)

    training = commands.add_parser(
        "train", help="train and write models", description=train.__doc__, formatter_class=shown
    )
    training.add_argument("models", nargs="*", default=list(MODELS), help="which")
    training.add_argument("--steps", type=int, default=6000, help="steps of each model")
    training.add_argument(
        "--minutes", type=float, help="time for each model in place of --steps; cannot be repeated exactly"
    )
    training.add_argument(
        "--batch-tokens", type=int, default=24576, help="tokens of dialogue, and as many of text, in a step"
    )
    training.add_argument("--chat-rows", type=int, default=40000, help="rows of dialogue to make")
    training.add_argument(
        "--chat-share", type=float, default=0.6, help="weight of the dialogues' loss; the rest is the text's"
    )
    training.add_argument("--small-talk", type=float, default=0.05, help="share of the questions that are small talk")
    training.add_argument(
        "--resume", action="store_true", help="go on from the weights and the tokenizer of the folder"
    )
    training.add_argument("--lr", type=float, default=4e-3, help="peak learning rate")
    training.add_argument("--weight-decay", type=float, default=0.05, help="of matrices")
    training.add_argument("--warmup", type=int, default=200, help="steps until the peak")
    training.add_argument("--seed", type=int, default=20, help="of weights, dialogues and batches")
    training.add_argument(
        "--compile", action="store_true", help="compile the step: slow to begin, then faster on a GPU"
    )
    training.set_defaults(run=train)

    checking = commands.add_parser(
        "check", help="print shapes and answers", description=check.__doc__, formatter_class=shown
    )
    checking.add_argument("models", nargs="*", default=list(MODELS), help="which")
    checking.add_argument("--tokens", type=int, default=96, help="tokens of an answer at most")
    checking.add_argument(
        "--prompt", action="append", help="ask this in place of the built-in questions; may be repeated"
    )
    checking.set_defaults(run=check)

    args = parser.parse_args()
    if unknown := [name for name in getattr(args, "models", []) if name not in MODELS]:
        parser.error(f"no such model: {', '.join(unknown)} (there are {', '.join(MODELS)})")
    args.run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
