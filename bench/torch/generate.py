#!/usr/bin/env python3
"""Tokens a second of a Llama on a GPU by the format of its linear layers, with Transformers' generate().

    python3 bench/torch/generate.py [--kinds bf16 w8a8 ...] [--batch 1 8 64] [--layers 16] [--prompt 128] [--seconds 300]
                                    [--json FILE] [--ways graphs] [--profile]

The model has the layers of Llama 3 8B (4096, 14336 in the MLP, 32 heads, 8 for keys) with random weights; its head stays
in bf16, as quantize_ leaves it. Decoding: a prompt of --prompt tokens, greedy, a static cache. `compiled` is what generate()
does with such a cache (mode "reduce-overhead"), `graphs` is octile.transformers.Decoding's loop, for every kind, `eager` is
without torch.compile, at the first batch alone unless it is the only way. A token's time is the difference of two calls
over the difference of their tokens, in turns, the median of `--rounds`. Prefill: one forward of 2,048 tokens. torchao's and
bitsandbytes' kinds are tried where they are installed. --profile: the kernels of a token instead, in the last of --ways.
"""

import argparse
import gc
import json
import pathlib
import statistics
import sys
import time

import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python"))
import octile.transformers  # noqa: E402


def torchao_kind(name, **options):
    def quantize(model):
        import torchao.quantization as ao

        ao.quantize_(model.model, getattr(ao, name)(**options))

    return quantize


def bitsandbytes_kind(four_bits):
    def quantize(model):
        import bitsandbytes

        for module in list(model.model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is not torch.nn.Linear:
                    continue
                sizes = (child.in_features, child.out_features)
                if four_bits:
                    layer = bitsandbytes.nn.Linear4bit(
                        *sizes, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
                    )
                else:
                    layer = bitsandbytes.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
                layer.load_state_dict({"weight": child.weight.cpu()})
                setattr(module, name, layer.to("cuda"))

    return quantize


def octile_kind(config, change=lambda model: None):
    def quantize(model):
        octile.quantize_(model, config, lambda module, name: "lm_head" not in name)
        change(model)
        octile.pack_(model)

    return quantize


KINDS = {
    "bf16": lambda model: None,
    "w8a8": octile_kind(octile.W8A8Dynamic()),
    "w8a8-joined": octile_kind(octile.W8A8Dynamic(), octile.join_),
    "w4a8": octile_kind(octile.W4A8()),
    "w4a8-joined": octile_kind(octile.W4A8(), octile.join_),
    "w4a16": octile_kind(octile.W4A16()),
    "w4a16-joined": octile_kind(octile.W4A16(), octile.join_),
    "torchao-int8": torchao_kind("Int8DynamicActivationInt8WeightConfig"),
    "torchao-int8-weights": torchao_kind("Int8WeightOnlyConfig"),
    "torchao-int4": torchao_kind("Int4WeightOnlyConfig", int4_packing_format="tile_packed_to_4d"),
    "bnb-8bit": bitsandbytes_kind(False),
    "bnb-nf4": bitsandbytes_kind(True),
}
WAYS = ("eager", "compiled", "graphs")
PROMPT, SHORT, LONG, PREFILL = 128, 16, 80, 2048


def model_of(layers):
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None,
        pad_token_id=None, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlamaForCausalLM(config)
        torch.set_default_dtype(default)
    return model.eval()


def seconds(body):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    body()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def generator(model, batch, way, prompt=PROMPT):
    """A function that generates so many tokens after `prompt`, warm. way: "eager", "compiled" or "graphs"."""
    decode = octile.transformers.Decoding() if way == "graphs" else None
    ids = torch.randint(0, 32000, (batch, prompt), device="cuda")

    def generate(tokens):
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            cache_implementation="static", disable_compile=way == "eager", max_length=None, custom_generate=decode,
        )  # fmt: skip

    for tokens in (LONG, SHORT, LONG):  # one cache size, so that one graph is compiled
        generate(tokens)
    return generate


def token_seconds(model, batch, rounds, way, prompt):
    generate = generator(model, batch, way, prompt)
    times = {SHORT: [], LONG: []}
    for _ in range(rounds):
        for tokens in (SHORT, LONG):
            times[tokens].append(seconds(lambda tokens=tokens: generate(tokens)))
    return (statistics.median(times[LONG]) - statistics.median(times[SHORT])) / (LONG - SHORT)


def kernels_of_a_token(model, batch, way, prompt):
    """(name, calls, microseconds) of each kernel, longest first: a call of LONG tokens less one of SHORT, per token."""
    generate = generator(model, batch, way, prompt)
    totals = {}
    for tokens, sign in ((SHORT, -1), (LONG, 1)):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            generate(tokens)
            torch.cuda.synchronize()
        for event in profile.events():
            total = totals.setdefault(event.name, [0, 0.0])
            total[0] += sign
            total[1] += sign * event.time_range.elapsed_us()
    table = [(name, calls / (LONG - SHORT), us / (LONG - SHORT)) for name, (calls, us) in totals.items()]
    return sorted(table, key=lambda row: -row[2])


def report(what, error):
    print(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after this time")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument(
        "--profile", action="store_true", help="the kernels of a token, in the last of --ways, and its time"
    )
    options = parser.parse_args()
    begin, lines = time.time(), []

    def add(kind, what, value, unit):
        lines.append({"kind": kind, "what": what, "value": value, "unit": unit})
        print(f"[{time.time() - begin:4.0f}s] {kind:20} {what:24} {value:10.1f} {unit}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(lines, indent=1))

    for kind in options.kinds:
        if time.time() - begin > options.seconds:
            break
        try:
            model = model_of(options.layers)
            KINDS[kind](model)
            add(kind, "memory", torch.cuda.memory_allocated() / 2**20, "MiB")
            if options.profile:
                way = options.ways[-1]
                for batch in options.batch:
                    torch._dynamo.reset()
                    with torch.no_grad():
                        add(
                            kind,
                            f"a token, {way}, batch {batch}",
                            1e6 * token_seconds(model, batch, 3, way, options.prompt),
                            "us",
                        )
                        rows = kernels_of_a_token(model, batch, way, options.prompt)
                    add(kind, "its kernels", sum(us for _, _, us in rows), "us")
                    for name, calls, us in rows[:40]:
                        print(f"    {us:9.2f} us {calls:7.2f} x  {name[:150]}", flush=True)
                continue
            ids = torch.randint(0, 32000, (1, PREFILL), device="cuda")
            with torch.no_grad():
                run = lambda model=model, ids=ids: model(ids, logits_to_keep=1, use_cache=False)  # noqa: E731
                run()
                add(
                    kind,
                    "prefill",
                    PREFILL / statistics.median(seconds(run) for _ in range(2 * options.rounds)),
                    "tokens/s",
                )
                for way in options.ways:
                    for batch in options.batch[:1] if way == "eager" and len(options.ways) > 1 else options.batch:
                        if time.time() - begin > options.seconds:
                            break
                        torch._dynamo.reset()
                        try:
                            value = batch / token_seconds(model, batch, options.rounds, way, options.prompt)
                        except Exception as error:
                            report(f"{kind}, {way}, batch {batch}", error)
                            continue
                        add(kind, f"decode, {way}, batch {batch}", value, "tokens/s")
        except Exception as error:  # a peer that does not run here is a line of the table
            report(kind, error)
        model = run = None
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
