"""Decoding gives generate()'s tokens: lengths, ends, padding, sampling, a second call; and refuses what it cannot do."""

import octile
import pytest
import torch

transformers = pytest.importorskip("transformers")
Decoding = pytest.importorskip("octile.transformers").Decoding

KINDS = [transformers.LlamaForCausalLM, transformers.Qwen3ForCausalLM, transformers.GPT2LMHeadModel,
         transformers.Gemma2ForCausalLM, transformers.FalconForCausalLM]  # fmt: skip
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128, "pad_token_id": 0,
         "bos_token_id": None, "eos_token_id": None}  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")


def model_of(device, kind=KINDS[0], layers=2):
    more = {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    torch.manual_seed(0)
    more = SIZES | {"num_hidden_layers": layers} | (more if kind.__name__[:5] in ("Llama", "Qwen3", "Gemma") else {})
    model = kind(kind.config_class(**more)).eval()
    octile.quantize_(model, octile.W8A8Dynamic(), lambda module, name: "lm_head" not in name)
    return model.to(device)


def prompt(device, batch=2, length=5):
    ids = torch.randint(1, 128, (batch, length), generator=torch.Generator().manual_seed(batch)).to(device)
    mask = torch.ones_like(ids)
    mask[0, : length // 2] = 0  # padded on the left
    return {"input_ids": ids, "attention_mask": mask}


def tokens(model, inputs, decode=None, **words):
    torch.manual_seed(3)
    words = {"max_new_tokens": 20, "do_sample": False} | words
    return model.generate(
        **inputs, cache_implementation="static", disable_compile=True, custom_generate=decode, **words
    )


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_generate(kind, device):
    # Falcon's own code copies indices from the host.
    decode = Decoding(compile=device.type == "cuda" and kind is transformers.FalconForCausalLM)
    model = model_of(device, kind)
    ends = [7, 9, 20, 33, 50, 70, 86, 101]
    for inputs, end in ((prompt(device), None), (prompt(device, 1, 9), ends), (prompt(device), ends)):
        want = tokens(model, inputs, eos_token_id=end)
        assert torch.equal(tokens(model, inputs, decode, eos_token_id=end), want)


def test_what_a_graph_cannot_record(device):
    if device.type != "cuda":
        pytest.skip("graphs are a GPU's")
    model = model_of(device, transformers.FalconForCausalLM)
    with pytest.raises(RuntimeError, match="CUDA graph.*compile=True"):
        tokens(model, prompt(device), Decoding(compile=False))


def test_an_end_before_the_last_position(device):
    model, inputs = model_of(device), prompt(device)
    free = tokens(model, inputs)
    end = sorted({free[0, 9].item(), free[1, 12].item()})
    want = tokens(model, inputs, eos_token_id=end)
    assert want.shape[1] < free.shape[1]
    decode = Decoding(compile=False)
    assert torch.equal(tokens(model, inputs, decode, eos_token_id=end), want)
    assert torch.equal(tokens(model, inputs, decode, eos_token_id=want[:, 5].tolist(), max_new_tokens=1), want[:, :6])


def test_samples_of_generate():
    model, inputs = model_of("cpu"), prompt("cpu")
    words = {"do_sample": True, "temperature": 2.0, "top_p": 0.9, "top_k": 40}
    want = tokens(model, inputs, **words)
    assert not torch.equal(want, tokens(model, inputs))
    assert torch.equal(tokens(model, inputs, Decoding(compile=False), **words), want)


def test_samples_stay_among_the_likely(device):
    model, inputs = model_of(device), prompt(device)
    words = {"do_sample": True, "top_k": 1}
    assert torch.equal(tokens(model, inputs, Decoding(compile=False), **words), tokens(model, inputs))


def test_compiled(device):
    model, inputs = model_of(device, layers=1), prompt(device)
    assert torch.equal(tokens(model, inputs, Decoding()), tokens(model, inputs))


@pytest.fixture
def graphs(monkeypatch):
    """Counts the graphs that torch.compile makes, without compiling them."""
    compile = torch.compile

    def short(function, options, **words):
        filtered = {name: value for name, value in options.items() if name == "guard_filter_fn"}
        return compile(function, backend="eager", options=filtered, **words)

    monkeypatch.setattr(torch, "compile", lambda function, options=(), **words: short(function, dict(options), **words))
    counted = torch._dynamo.utils.counters["stats"]
    before = counted["unique_graphs"]
    return lambda: counted["unique_graphs"] - before


def test_programs(graphs, device):
    """A program for each batch, address and shape of a weight, and inference_mode, but not for each logits processor."""
    # On a GPU, another program writes the token, and one more writes a sampled token.
    wanted = iter([2, 4, 5, 7, 9, 11] if device.type == "cuda" else [1, 2, 2, 3, 4, 5])
    model, decode = model_of(device), Decoding()
    for batch, words in [(2, {}), (1, {}), (2, {"do_sample": True, "top_k": 1})]:
        inputs = prompt(device, batch)
        assert torch.equal(tokens(model, inputs, decode, **words), tokens(model, inputs))
        assert graphs() == next(wanted)
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight)
    assert torch.equal(tokens(model, inputs, decode), tokens(model, inputs))
    assert graphs() == next(wanted)
    with torch.inference_mode():
        assert torch.equal(tokens(model, inputs, decode), tokens(model, inputs))
    assert graphs() == next(wanted)
    model.lm_head.weight.data = model.lm_head.weight.data[:100]  # the same memory
    assert torch.equal(tokens(model, inputs, decode), tokens(model, inputs))
    assert graphs() == next(wanted)
    other = model_of(device, layers=1)
    assert torch.equal(tokens(other, inputs, decode), tokens(other, inputs))


@pytest.mark.parametrize(
    "breaking", [lambda *_: torch._dynamo.graph_break(), lambda *a: a[2] * (1 if a[2].sum() > 0 else 2)]
)
def test_compiled_in_parts(breaking, graphs):
    """A model that torch.compile splits into more than one graph."""
    model, decode = model_of("cpu", layers=1), Decoding()
    model.lm_head.register_forward_hook(breaking)
    for batch in (2, 1):
        assert torch.equal(tokens(model, prompt("cpu", batch), decode), tokens(model, prompt("cpu", batch)))
    assert graphs() > 2


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("masked", [None, torch.bool, torch.float32])
def test_attention_of_one_query(rows, masked, device):
    from octile.decoding import _one_query
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, positions, 16, device=device) for heads, positions in ((6, rows), (2, 9), (2, 9))
    )
    mask = None if masked is None else torch.rand(2, 1, rows, 9, device=device) < 0.6
    if mask is not None:
        mask[..., 0] = True
        mask = mask if masked == torch.bool else torch.zeros(mask.shape, device=device).masked_fill(~mask, -torch.inf)
    module = torch.nn.Module()
    module.num_key_value_groups = 3
    got, want = (f(module, query, key, value, mask, scaling=0.3)[0] for f in (_one_query, sdpa_attention_forward))
    assert got.shape == want.shape == (2, rows, 6, 16)
    assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)


def test_attention_is_given_back(device):
    model, inputs = model_of(device), prompt(device)
    seen = []
    hook = model.lm_head.register_forward_hook(lambda *_: seen.append(model.config._attn_implementation))
    tokens(model, inputs, Decoding(compile=False))
    assert set(seen) == {"sdpa", "octile_one_query"} and model.config._attn_implementation == "sdpa"
    hook.remove()
    model.lm_head.register_forward_hook(lambda *_: seen.append(1 / (model.config._attn_implementation == "sdpa")))
    with pytest.raises(ZeroDivisionError):
        tokens(model, inputs, Decoding(compile=False))
    assert model.config._attn_implementation == "sdpa"
    model.config._attn_implementation = "eager"
    want = tokens(model_of(device), inputs)
    model.lm_head._forward_hooks.clear()
    if device.type == "cuda":
        with pytest.raises(ValueError, match='octile: .*"eager"'):
            tokens(model, inputs, Decoding(compile=False))
    else:
        assert torch.equal(tokens(model, inputs, Decoding(compile=False)), want)


def test_weights_that_moved(device):
    model, inputs, decode = model_of(device), prompt(device), Decoding(compile=False)
    tokens(model, inputs, decode)
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight)
    want = tokens(model, inputs)
    assert torch.equal(tokens(model, inputs, decode), want)
    with torch.no_grad():
        model.lm_head.weight.neg_()  # in place: the graph reads it
    assert not torch.equal(tokens(model, inputs, decode), want)
    other = model_of(device, KINDS[1])
    assert torch.equal(tokens(other, inputs, decode), tokens(other, inputs))


def test_static_scales_that_changed(graphs, device):
    model, inputs, decode = model_of(device, layers=1), prompt(device), Decoding()
    down = torch.nn.Linear(96, 64, bias=False, device=device)
    model.model.layers[0].mlp.down_proj = down = octile.W8A8StaticLinear.from_linear(down, 0.01)
    assert torch.equal(tokens(model, inputs, decode), tokens(model, inputs))
    with torch.no_grad():
        down.input_scale.mul_(1e-3)
        down.weight_scale.mul_(1e3)
    want = tokens(model, inputs)
    assert torch.equal(tokens(model, inputs, decode), want)
    before = graphs()
    assert torch.equal(tokens(model, inputs, decode), want) and graphs() == before


def test_windows_and_other_states():
    kind = transformers.Gemma2ForCausalLM
    words = SIZES | {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16}
    model, inputs = kind(kind.config_class(**words)).eval(), prompt("cpu")
    short, decode = {"max_new_tokens": 11}, Decoding(compile=False)
    assert torch.equal(tokens(model, inputs, decode, **short), tokens(model, inputs, **short))
    with pytest.raises(ValueError, match="octile: .* 17 tokens with a sliding window of 16"):
        tokens(model, inputs, decode, max_new_tokens=12)
    kind = transformers.JambaForCausalLM
    words = SIZES | {"intermediate_size": 96, "num_key_value_heads": 2, "use_mamba_kernels": False, "num_experts": 2}
    with pytest.raises(ValueError, match="octile: "):
        tokens(kind(kind.config_class(**words)).eval(), inputs, decode)


def test_a_cache_that_the_model_makes():
    """Phi-3's RoPE for prompts longer than the trained positions; crossing that length while generating is refused."""
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 20.0,
            "rope_theta": 1e4, "original_max_position_embeddings": 24}  # fmt: skip
    words = SIZES | {"intermediate_size": 96, "rope_parameters": rope, "original_max_position_embeddings": 24}
    kind = transformers.Phi3ForCausalLM
    torch.manual_seed(0)
    model, decode = kind(kind.config_class(**words)).eval(), Decoding(compile=False)
    for length, new in ((30, 20), (9, 15)):
        inputs = prompt("cpu", 1, length)
        want = tokens(model, inputs, max_new_tokens=new)
        assert torch.equal(tokens(model, inputs, decode, max_new_tokens=new), want)
    with pytest.raises(ValueError, match="octile: .* after 24 tokens"):
        tokens(model, inputs, decode, max_new_tokens=16)


def test_local_attention():
    """GPT-Neo's window, if it ends where the cache does."""
    kind = transformers.GPTNeoForCausalLM
    words = SIZES | {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 32}
    torch.manual_seed(0)
    model, inputs = kind(kind.config_class(**words)).eval(), prompt("cpu", 1, 7)
    decode = Decoding(compile=False)
    assert torch.equal(tokens(model, inputs, decode, max_new_tokens=25), tokens(model, inputs, max_new_tokens=25))
    with pytest.raises(ValueError, match="octile: .* 33 tokens with a sliding window of 32"):
        tokens(model, inputs, decode, max_new_tokens=26)


class Streamer(transformers.generation.BaseStreamer):
    def __init__(self):
        self.got, self.ended = [], False

    def put(self, value):
        self.got.append(value.tolist())

    def end(self):
        self.ended = True


@pytest.mark.parametrize("batch", [1, 2])
def test_streams_as_generate_does(batch, device):
    """The prompt, which TextStreamer(skip_prompt=True) drops, and then each token."""
    model, inputs, own, ours = model_of(device), prompt(device, batch), Streamer(), Streamer()
    tokens(model, inputs, streamer=own)
    out = tokens(model, inputs, Decoding(compile=False), tokens_to=ours)
    assert ours.ended and ours.got == own.got == [out[:, :5].tolist(), *out[:, 5:].T.tolist()]


@pytest.mark.parametrize(
    "words, why",
    [
        ({"num_beams": 2}, "num_beams is 2"),
        ({"prompt_lookup_num_tokens": 2}, "not support assisted_generation"),
        ({"dola_layers": "high"}, "not support dola_generation"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "not support contrastive_search"),
        ({"force_words_ids": [[5]]}, "not support constrained_beam_search"),
        ({"inputs_embeds": torch.ones(2, 5, 64), "input_ids": None}, "not inputs_embeds"),
        ({"repetition_penalty": 1.5}, "not support RepetitionPenaltyLogitsProcessor"),
        ({"max_time": 3.0}, "not support MaxTimeCriteria"),
        ({"return_dict_in_generate": True}, "returns only tokens"),
        ({"cache_implementation": "dynamic"}, 'cache_implementation="static"'),
    ],
)
def test_refuses(words, why):
    model, inputs = model_of("cpu"), prompt("cpu")
    with pytest.raises(ValueError, match=f"octile: .*{why}"):
        model.generate(
            **inputs | {"cache_implementation": "static", "max_new_tokens": 4, "custom_generate": Decoding()} | words
        )


def queries(shape, dtype, device):
    """batch, heads, KV heads, positions and size -> query, key and value; key and value are strided."""
    batch, heads, shared, positions, size = shape
    generator = torch.Generator(device).manual_seed(positions)
    random = lambda *sizes: torch.randn(sizes, generator=generator, device=device).to(dtype)  # noqa: E731
    k, v = (random(batch, positions, shared, size).transpose(1, 2) for _ in range(2))
    return random(batch, heads, 1, size), k, v


def attention_in_f64(q, k, v, mask, scale=None):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1).double() for t in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q.double(), k, v, mask, scale=scale).transpose(1, 2)


SHAPES = [(1, 8, 2, 256, 128), (2, 4, 4, 100, 64), (3, 6, 2, 700, 80), (2, 4, 1, 1300, 256), (2, 5, 1, 96, 96)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shown", ["all", "beginning", "some", "none of one"])
def test_kernel_of_one_query(shape, dtype, shown, device):
    from octile import one_query

    if not one_query.runs_on(device):
        pytest.skip("on GPUs the kernel is in Triton")
    batch, heads, shared, positions, size = shape
    q, k, v = queries(shape, dtype, device)
    if device.type == "cuda" and dtype is torch.float32:
        assert not one_query.takes(q, k, v, None)
        return
    generator = torch.Generator(device).manual_seed(1)
    mask = torch.rand(batch, 1, 1, positions, generator=generator, device=device) < 0.3
    if shown == "all":
        mask = None
    elif shown == "beginning":
        mask = (torch.arange(positions, device=device) < positions // 3 + 1).expand(1, 1, 1, positions)
    elif shown == "none of one":
        mask[0] = False
    assert one_query.takes(q, k, v, mask)
    y = one_query.attend(q, k, v, mask, None)
    want = attention_in_f64(q, k, v, mask)
    if shown == "none of one":
        assert not y[0].any()
        y, want = y[1:], want[1:]
    step = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2**-20}[dtype]
    torch.testing.assert_close(y.double(), want, rtol=step, atol=step)
    for one in range(batch):  # a sequence alone has the same bits
        masks = None if mask is None else mask[one % len(mask)][None]
        alone = one_query.attend(q[one, None], k[one, None], v[one, None], masks, None)
        assert torch.equal(alone, one_query.attend(q, k, v, mask, None)[one, None])
    assert not one_query.takes(q.double(), k.double(), v.double(), mask)
    assert not one_query.takes(q, k.double(), v, mask)
    assert not one_query.takes(q.expand(batch, heads, 2, size), k, v, mask)
    assert not one_query.takes(q, k, v[..., : size // 2], mask)
    assert not one_query.takes(q, k, v.contiguous().transpose(2, 3).contiguous().transpose(2, 3), mask)
    assert not one_query.takes(q.requires_grad_(), k, v, mask)
    with torch.no_grad():
        assert one_query.takes(q, k, v, mask)
    empty = one_query.attend(q.detach(), k[:, :, :0], v[:, :, :0], None, None)
    assert empty.shape == (batch, 1, heads, size) and not empty.any()
    for wrong in [(q, k, v[..., : size // 2], mask), (q.expand(batch, heads, 2, size), k, v, mask)]:
        with pytest.raises(RuntimeError, match="octile"):
            one_query.attend(*wrong, None)
    if mask is not None:
        with pytest.raises(RuntimeError, match="octile"):
            one_query.attend(q, k, v, mask.to(q.dtype), None)
        assert not one_query.takes(q, k, v, mask.float())
        assert not one_query.takes(q, k, v, mask.expand(-1, heads, 1, positions))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernel_of_one_query_on_threads_and_hidden_positions(dtype):
    from octile.one_query import attend

    q, k, v = queries((2, 12, 4, 600, 64), dtype, "cpu")
    mask = torch.arange(600).expand(2, 1, 1, 600) < 333
    want = attend(q, k, v, mask, 0.2)
    torch.testing.assert_close(want.double(), attention_in_f64(q, k, v, mask, 0.2), rtol=2**-7, atol=2**-7)
    k[:, :, 333:], v[:, :, 333:] = torch.inf, torch.nan
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(attend(q, k, v, mask, 0.2), want)
    finally:
        torch.set_num_threads(1)
    v[1, 3, 7, 5] = torch.nan
    got = attend(q, k, v, mask, 0.2).isnan()
    assert got[1, 0, 9:, 5].all() and got.sum() == 3


def test_kernel_of_one_query_refuses():
    from octile.one_query import attend

    q, k, v = queries((2, 6, 2, 20, 64), torch.float32, "cpu")
    mask = torch.ones(2, 1, 1, 20, dtype=torch.bool)
    for given, why in [
        ((q[..., 0], k, v, mask), "query has 3 dimensions, expected 4"),
        ((q.expand(2, 6, 3, 64), k, v, mask), "query has 3 rows, expected 1"),
        ((q, k.bfloat16(), v, mask), "key is bf16 .* expected f32"),
        ((q, k, v[:, :, 1:], mask), r"value is f32 \(2, 2, 19, 64\)"),
        ((q, k, v, mask.float()), "mask is of float32"),
        ((q, k, v, mask.expand(2, 6, 1, 20)), r"mask is \(2, 6, 1, 20\), expected \(batch or 1,"),
        ((q, k, v, mask[..., 1:]), r"mask is u8 \(2, 19\)"),
        ((q[:, :5], k, v, mask), "do not divide the 5 of query"),
        ((q.double(), k.double(), v.double(), mask), "expected f16, bf16 or f32"),
    ]:
        with pytest.raises(RuntimeError, match=f"octile::attend_one_query: .*{why}"):
            attend(*given, None)
