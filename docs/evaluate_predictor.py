"""How well output lengths can be predicted, on held-out data; the numbers of predictor.md come from here.

``python docs/evaluate_predictor.py FOLDER`` reads the workload files in FOLDER. The part on prompts needs
scikit-learn and is left out without it.
"""

import csv
import gzip
import json
import sys
from pathlib import Path

import numpy as np

QUANTILES = (0.5, 0.8, 0.9, 0.95)
MODELS = ("Qwen1.5-7B-Chat", "llama-2-13b-chat-hf", "Mistral-7B-Instruct-v0.2", "vicuna-13b-v1.5")


def pinball(true: np.ndarray, reserved: np.ndarray, quantile: float) -> float:
    """Mean pinball loss, the cost that a quantile minimizes."""
    missing = true - reserved
    return float(np.maximum(quantile * missing, (quantile - 1) * missing).mean())


def compare(name: str, true: np.ndarray, plain: np.ndarray, learned: np.ndarray, quantile: float) -> None:
    """Print loss, mean reservation, and outputs that outgrow it, for two predictions of a quantile."""
    losses = pinball(true, plain, quantile), pinball(true, learned, quantile)
    change = losses[1] / losses[0] - 1
    print(
        f"{name:34} q={quantile:.2f}  loss {losses[0]:6.1f} -> {losses[1]:6.1f} ({change:+.0%})"
        f"  reserved {plain.mean():5.0f} -> {learned.mean():5.0f}"
        f"  outgrown {(true > plain).mean():.1%} -> {(true > learned).mean():.1%}"
    )


def classifier(folder: Path) -> None:
    """A BERT of five length classes, as published: half of its predictions calibrate, half are judged."""
    with gzip.open(folder / "ssjf_vicuna13b_length_predictions.csv.gz", "rt") as file:
        rows = np.array([(int(r["output_tokens"]), int(r["pred_class5"])) for r in csv.DictReader(file)])
    calibrating = np.random.default_rng(0).random(len(rows)) < 0.5
    known, judged = rows[calibrating], rows[~calibrating]
    true = judged[:, 0].astype(float)
    classes = range(5)
    for quantile in QUANTILES:
        by_class = np.array([np.quantile(known[known[:, 1] == c, 0], quantile) for c in classes])
        plain = np.full(len(true), np.quantile(known[:, 0], quantile))
        compare("BERT, 5 classes, Vicuna-13B", true, plain, by_class[judged[:, 1]], quantile)
    medians = np.array([np.median(known[known[:, 1] == c, 0]) for c in classes])
    ratio = medians[judged[:, 1]] / true
    near = [(abs(ratio - 1) <= error).mean() for error in (0.05, 0.2)]
    print(f"within 5 %: {near[0]:.1%}, within 20 %: {near[1]:.1%}")
    at = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
    print("predicted / true:", [(q, round(float(np.quantile(ratio, q)), 3)) for q in at])


def prompts(folder: Path) -> None:
    """Quantile boosting on the words of the prompt, five-fold, against the training folds' own quantile."""
    from sklearn.decomposition import TruncatedSVD
    from sklearn.ensemble import GradientBoostingRegressor
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.model_selection import KFold

    with gzip.open(folder / "alpacaeval_prompt_lengths.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    texts = [row["instruction"] for row in rows]
    lengths = np.log1p([[row["input_tokens"], row["instruction"].count("\n")] for row in rows])
    quantile = 0.8
    for model in MODELS:
        true = np.array([row["output_tokens"][model] for row in rows], float)
        plain, learned = np.zeros(len(true)), np.zeros(len(true))
        for known, judged in KFold(5, shuffle=True, random_state=0).split(true):
            words = TfidfVectorizer(min_df=2, sublinear_tf=True).fit([texts[i] for i in known])
            topics = TruncatedSVD(30, random_state=0).fit(words.transform([texts[i] for i in known]))
            features = np.hstack([topics.transform(words.transform(texts)), lengths])
            boosting = GradientBoostingRegressor(
                loss="quantile",
                alpha=quantile,
                n_estimators=150,
                learning_rate=0.05,
                subsample=0.7,
                min_samples_leaf=10,
                random_state=0,
            )
            boosting.fit(features[known], true[known])
            learned[judged], plain[judged] = (
                boosting.predict(features[judged]),
                np.quantile(true[known], quantile),
            )
        compare(f"prompt words, {model}", true, plain, learned, quantile)


def streams(folder: Path) -> None:
    """What the running predictor does on whole traces: shares of outputs that outgrow their reservation."""
    from services.global_sched.predict import OutputPredictor

    names = ("azure2023_conv.csv", "azure2023_code.csv", "mooncake_fast25_conversation.csv")
    for name in (*names, "sharegpt4_8k_llama2_lengths.csv"):
        with (folder / name).open() as file:
            pairs = [(int(r["input_tokens"]), int(r["output_tokens"])) for r in csv.DictReader(file)]
        running = OutputPredictor(0.8, 0.05, 256)
        true = np.array([tokens for _, tokens in pairs], float)
        learned = np.zeros(len(pairs))
        for i, (given, tokens) in enumerate(pairs):
            learned[i] = running.predict("m", given, 10**6, 10**7)
            running.observe("m", given, tokens)
        plain = np.full(len(true), 1.05 * np.quantile(true, 0.8))  # of the whole trace, as if known before
        compare(f"running quantiles, {name[:14]}", true, plain, learned, 0.8)
        cold = true[:20] > learned[:20]
        print(f"    of the first 20 requests {cold.mean():.0%} outgrow the prior's reservation")


def main() -> None:
    """Print everything."""
    folder = Path(sys.argv[1])
    classifier(folder)
    streams(folder)
    try:
        prompts(folder)
    except ImportError:
        print("no scikit-learn here: the part on prompts is left out")


if __name__ == "__main__":
    main()
