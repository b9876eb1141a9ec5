"""Decoding with Transformers' generate() as one program per token.

generate() runs some hundred lines of Python for a token and then waits for it, so with fast linear layers the host takes
longer than the GPU. Here a token is one CUDA graph: the model, the choice of the next token, the test for the end. The
host starts it, and reads its output two tokens later. On a CPU a token is one program of torch.compile without guards.
"""

import collections
import contextlib
import functools
import inspect
import types
from typing import NamedTuple

import torch
import transformers
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.generation import GenerationMixin, logits_process
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from . import one_query
from .inference import W8A8StaticLinear

__all__ = ["Decoding"]

_LATE = 2  # tokens that the host starts before it reads the first of them
_POSITIONS = 256  # a cache has a multiple of this many, so that prompts of similar lengths share a graph
_PROCESSORS = ("Temperature", "TopK", "TopP", "MinP", "Typical", "Epsilon", "Eta")
_PROCESSORS = tuple(getattr(logits_process, f"{name}LogitsWarper") for name in _PROCESSORS)
# What models call their cache: "past_key_values" before Transformers 5.24.
_prepare = inspect.signature(GenerationMixin.prepare_inputs_for_generation)
_CACHE = "cache" if "cache" in _prepare.parameters else "past_key_values"
_ATTENTION = "octile_one_query"
_METHODS = ("greedy_search", "sample")
_PLAIN_WORDS = {"is_causal", "position_ids", "sliding_window", "use_cache", _CACHE}  # do not change one row's attention
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def _one_query(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **words):
    """Transformers' "sdpa" attention. For one query token a kernel reads what the mask lets through, for the tensors that it
    takes; else the heads that share keys and values become the rows of one head, so that these are not repeated in memory.

    query: (batch, heads, rows, size); key and value: (batch, heads / groups, positions, size). Returns (batch, rows, heads, size).
    """
    if not dropout and _plain(words) and one_query.takes(query, key, value, attention_mask):
        return one_query.attend(query, key, value, attention_mask, scaling), None
    batch, heads, rows, size = query.shape
    groups = heads // key.shape[1]
    masks_differ = attention_mask is not None and attention_mask.shape[1] > 1
    if rows > 1 or groups == 1 or not _plain(words) or masks_differ:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **words)
    query = query.reshape(batch, heads // groups, groups, size)
    y = torch.nn.functional.scaled_dot_product_attention(query, key, value, attention_mask, dropout, scale=scaling)
    return y.reshape(batch, 1, heads, -1), None


def _plain(words):
    return all(words[name] is None for name in words.keys() - _PLAIN_WORDS)


transformers.AttentionInterface.register(_ATTENTION, _one_query)
transformers.AttentionMaskInterface.register(_ATTENTION, transformers.masking_utils.sdpa_mask)


@contextlib.contextmanager
def _one_query_in(model):
    """Replaces the attention "sdpa" in all parts of the model, and puts it back."""
    models = [part for part in model.modules() if isinstance(part, transformers.PreTrainedModel)]
    # The others read the attention's name themselves.
    fixed = {id(part.config) for part in models if not part._supports_attention_backend}
    configs = {id(part.config): part.config for part in models if id(part.config) not in fixed}
    configs = [config for config in configs.values() if config._attn_implementation == "sdpa"]
    for config in configs:
        config._attn_implementation_internal = _ATTENTION
    try:
        yield
    finally:
        for config in configs:
            config._attn_implementation_internal = "sdpa"


def _on_its_device(call):
    """Makes the GPU of input_ids the current one, where streams and graphs are made."""

    @functools.wraps(call)  # generate() reads the signature
    def on_device(self, model, input_ids, *arguments, **words):
        with torch.cuda.device_of(input_ids):
            return call(self, model, input_ids, *arguments, **words)

    return on_device


class Decoding:
    """The loop of generate(), greedy or sampling, with one program for each token: a CUDA graph on a GPU.

        decode = octile.transformers.Decoding()
        model.generate(**inputs, cache_implementation="static", custom_generate=decode)

    Greedy tokens are those of generate(), unless torch.compile or the order of the sums of attention changes which logit
    is the largest. compile: whether to compile the model with torch.compile. early_start: whether compiled kernels may
    start before the preceding kernel has ended (programmatic dependent launch, Hopper and newer), if torch can generate
    such kernels. Octile's own kernels always do.

    One program and its cache are kept for each batch size and reused by calls that fit into that cache. They are rebuilt
    for another model, when a weight has moved in memory and when a static scale has changed; graphs also for other logits
    processors. Other changes, such as a hook, or enabling, disabling or merging a LoRA adapter, go undetected: call
    clear() after them. Holds the last model until then. Not thread-safe.

    While the loop runs, parts of the model whose attention is "sdpa" have one in which heads that share keys and values
    read them once.

    generate(tokens_to=streamer) streams, the prompt first, as generate(streamer=streamer) does by itself. Transformers
    5.23 does not pass `streamer` and `assistant_model` to custom loops, so Decoding ignores both.

    Raises ValueError for what it cannot do: methods of generate() other than greedy and sampling (beams, contrastive
    search, DoLa, constraints, prompt lookup), inputs_embeds, encoder-decoder models, a cache other than generate()'s
    own static one, outputs other than tokens, processors that look at earlier tokens, stopping criteria other than a
    length and end tokens, models on several devices, states other than keys and values, more tokens than a sliding
    window has.
    """

    def __init__(self, *, compile=True, early_start=True):
        self._compile, self._early_start = compile, early_start
        self.clear()

    def clear(self):
        """Frees all graphs, programs and caches, and releases the model."""
        self._model, self._steps = None, {}

    @torch.no_grad()
    @_on_its_device
    def __call__(
        self, model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=False, streamer=None,
        tokens_to=None, **words,
    ):  # fmt: skip
        """What generate() calls. Returns the tokens, those of the prompt included: (batch, length)."""
        end, longest = _limits(stopping_criteria)
        _check(model, input_ids, longest, logits_processor, generation_config, synced_gpus, words, self._compile)
        if streamer is None and tokens_to is not None:
            streamer = tokens_to
            streamer.put(input_ids.cpu())  # as generate() does with its own `streamer`
        length = input_ids.shape[1]
        step = self._step(model, input_ids, longest, logits_processor, generation_config.do_sample, end, words)
        pad = generation_config._pad_token_tensor
        step.begin(model, input_ids, words, end, 0 if pad is None else pad)
        length += 1
        watched = end or streamer is not None  # else nothing is read before the last token
        said, stop = collections.deque(), None
        if watched:
            said.append((length, *step.say()))
        with contextlib.ExitStack() as stack:
            if length < longest and step.in_python:
                stack.enter_context(_one_query_in(model))
            while length < longest and stop is None:
                step.run()
                length += 1
                if watched:
                    said.append((length, *step.say()))
                    if len(said) > _LATE:
                        stop = _hear(*said.popleft(), streamer)
        while said and stop is None:
            stop = _hear(*said.popleft(), streamer)
        if streamer is not None:
            streamer.end()
        return step.ids[:, : stop or length].clone()

    def _step(self, model, ids, longest, processors, sample, end, words):
        if self._model is not model:
            self.clear()
            self._model = model
        weights = [*model.parameters(), *model.buffers()]
        kind = (
            tuple((weight.data_ptr(), weight.dtype, weight.shape, weight.stride()) for weight in weights),
            # A program has the numbers of static scales inside.
            tuple(m._static_scale() for m in model.modules() if isinstance(m, W8A8StaticLinear)),
            model.training, "position_ids" in words,
            torch.is_inference_mode_enabled(), torch.is_autocast_enabled(ids.device.type),
            torch.get_autocast_dtype(ids.device.type),
        )  # fmt: skip
        choice = (sample, len(end), tuple((type(one), repr(vars(one))) for one in processors))
        step = self._steps.get(ids.shape[0])
        if step is None or (step.kind, step.choice) != (kind, choice) or step.capacity < longest:
            old = self._steps.pop(ids.shape[0], None)
            cache, capacity = _cache(model, max(longest, ids.shape[1] + 1))
            known = old is not None and (old.kind, old.capacity) == (kind, capacity)
            programs = old.programs if known else self._programs(model, ids.device)
            step = _Step(programs, cache, capacity, ids, processors, sample, end, "position_ids" in words)
            step.kind, step.choice = kind, choice
            self._steps[ids.shape[0]] = step
        return step

    def _programs(self, model, device):
        """What computes the logits of a token, and _settle."""

        def forward(**words):
            return model(**words, use_cache=True, return_dict=True).logits[:, -1]

        if not self._compile:
            return forward, _settle
        forward = _own(forward)
        if device.type == "cuda":
            options = {"combo_kernels": True}  # one launch for rotary positions and the writes to the cache
            if self._early_start and hasattr(torch._inductor.config.triton, "enable_pdl"):
                options["triton.enable_pdl"] = True
            return [torch.compile(f, dynamic=False, options=options) for f in (forward, _own(_settle))]
        guarded = torch.compile(forward, dynamic=False)
        if not hasattr(torch.compiler, "skip_all_guards_unsafe"):
            return guarded, _settle
        # _step has compared what the guards would, in less time. Only a whole graph keeps its programs apart.
        options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe, "cpp_wrapper": True}
        return _Fallback(torch.compile(forward, dynamic=False, fullgraph=True, options=options), guarded), _settle


def _own(function):
    """A copy with a code object of its own: torch.compile caches programs by code object."""
    code = function.__code__.replace()
    return types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


class _Fallback:
    """Calls `first`, or `second` if torch.compile cannot compile `first`."""

    def __init__(self, first, second):
        self._chosen, self._second = first, second

    def __call__(self, **words):
        try:
            return self._chosen(**words)
        except torch._dynamo.exc.TorchDynamoException:
            if self._chosen is self._second:
                raise
            self._chosen = self._second
            return self._chosen(**words)


class _Layer(StaticLayer):
    """Keys and values of a layer. The position of the next token is the same for all layers, so the loop advances it."""

    def __init__(self, capacity, next_position):
        super().__init__(capacity)
        self.cumulative_length = next_position  # Transformers' name

    def update(self, keys, values, *args, **words):
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        at = torch.arange(keys.shape[-2], device=self.device) + self.cumulative_length
        self.keys.index_copy_(2, at, keys)
        self.values.index_copy_(2, at, values)
        return self.keys, self.values


class _Step:
    """A token of a batch, in memory of its own: a graph on a GPU."""

    def __init__(self, programs, cache, capacity, ids, processors, sample, end, positions):
        batch, self._cache, self.capacity = ids.shape[0], cache, capacity
        self.programs, self._processors, self._sample = programs, processors, sample
        self._next_position = cache.layers[0].cumulative_length
        empty = lambda *shape: torch.zeros(shape, dtype=torch.long, device=ids.device)  # noqa: E731
        self._state = _State(
            empty(batch).bool(), empty(len(end)), empty(1), empty(batch, 1), empty(batch, self.capacity), empty(1), empty(batch + 1)
        )  # fmt: skip
        self.ids, self._mask, self._graph = self._state.ids, None, None
        self._positions = empty(batch, 1) if positions else None

    def begin(self, model, ids, words, end, pad):
        """The first token, from the prompt."""
        mask = words.get("attention_mask")
        if self._mask is None:
            self._mask = torch.ones(ids.shape[0], self.capacity, dtype=torch.long, device=ids.device)
            self._prefill(model, ids[:, :1], {})  # allocates the cache
            if ids.is_cuda:
                with _one_query_in(model):
                    self._capture()
        self._mask.fill_(1)
        if mask is not None:
            self._mask[:, : mask.shape[1]] = mask
        self._state.unfinished.fill_(True)
        self._state.end.copy_(torch.tensor(end, dtype=torch.long))
        self._state.pad.fill_(pad)
        self.ids[:, : ids.shape[1]] = ids
        self._state.at.fill_(ids.shape[1])
        if self._positions is not None:
            self._positions.copy_(words["position_ids"][:, -1:] + 1)
        self._choose(self._prefill(model, ids, words), _settle)

    @property
    def in_python(self):
        """Whether there is no graph."""
        return self._graph is None

    def run(self):
        """The next token."""
        if self._graph is None:
            self._next()
        else:
            self._graph.replay()

    def say(self):
        """The last token of each sequence, and whether any goes on; on the host when the event is done."""
        if not self._state.said.is_cuda:
            return self._state.said.clone(), None
        host = torch.empty(self._state.said.shape, dtype=torch.long, pin_memory=True)
        host.copy_(self._state.said, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return host, event

    def _prefill(self, model, ids, words):
        """The prompt, with a cache of its length, which needs no mask for the positions behind it."""
        cache = transformers.DynamicCache(config=model.config.get_text_config(decoder=True))
        words = {**words, _CACHE: cache, "use_cache": True}
        inputs = model.prepare_inputs_for_generation(ids, is_first_iteration=True, **words)
        outputs = model(**inputs, return_dict=True)
        cache = getattr(outputs, _CACHE, None) or cache  # some models make one of their own
        if cache.get_seq_length() != ids.shape[1]:
            raise ValueError(
                f"octile: Decoding found no cache of {ids.shape[1]} tokens after {type(model).__name__}'s prompt"
            )
        self._cache.reset()
        for kept, layer in zip(self._cache.layers, cache.layers, strict=True):
            if layer.is_initialized:
                kept.update(layer.keys, layer.values)
        self._next_position.fill_(ids.shape[1])
        return outputs.logits[:, -1]

    def _next(self):
        words = {_CACHE: self._cache}
        if self._positions is not None:
            words["position_ids"] = self._positions
        forward, settle = self.programs
        logits = forward(input_ids=self._state.token, attention_mask=self._mask, **words)
        self._choose(logits, settle)
        self._next_position += 1
        if self._positions is not None:
            self._positions += 1

    def _choose(self, logits, settle):
        scores = self._processors(self.ids, logits.float()) if self._processors else logits
        chosen = torch.multinomial(torch.softmax(scores.float(), -1), 1)[:, 0] if self._sample else None
        settle(scores, chosen, self._state)

    def _capture(self):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles, and whatever a kernel does at its first launch
                self._cache.reset()
                self._state.at.zero_()
                self._next()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self._graph):
                self._next()
        except RuntimeError as error:
            text = "Decoding cannot record this model in a CUDA graph (compile=True may help): "
            raise RuntimeError(text + str(error)) from error


class _State(NamedTuple):
    """What the loop keeps of the sequences of a batch."""

    unfinished: torch.Tensor  # (batch), bool
    end: torch.Tensor  # the end tokens
    pad: torch.Tensor  # (1)
    token: torch.Tensor  # (batch, 1), the last one
    ids: torch.Tensor  # (batch, capacity), all of them
    at: torch.Tensor  # (1), how many
    said: torch.Tensor  # (batch + 1), for the host: the last tokens, and whether any sequence goes on


def _settle(scores, chosen, state):
    """Writes each sequence's next token: `chosen` (batch), or that of the highest score, (batch, tokens)."""
    unfinished, end, pad, token, ids, at, said = state
    chosen = scores.argmax(-1) if chosen is None else chosen
    token[:, 0] = torch.where(unfinished, chosen, pad)
    unfinished &= (token != end).all(-1)
    ids.index_copy_(1, at, token)
    at += 1
    said.copy_(torch.cat([token[:, 0], unfinished.any()[None]]))


def _cache(model, needed):
    """A cache of `needed` positions or more, and how many it has. Its counter is a tensor, which a graph advances."""
    config = model.config.get_text_config(decoder=True)
    capacity = -(-needed // _POSITIONS) * _POSITIONS
    cache = transformers.StaticCache(config=config, max_cache_len=capacity)
    windows = [layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticSlidingWindowLayer)]
    if "local" in getattr(config, "attention_layers", ()):  # GPT-Neo, whose window ends where the cache does
        windows.append(config.window_size)
    capacity = min([capacity, *windows])
    if capacity < needed:
        raise ValueError(
            f"octile: Decoding does not support {needed} tokens with a sliding window of {capacity}, whose position Transformers counts "
            "in Python"
        )
    next_position = torch.zeros((), dtype=torch.long, device=model.device)
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
            raise ValueError(
                f"octile: Decoding does not support {type(layer).__name__}, which {type(model).__name__} uses"
            )
        if not isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
            raise ValueError(f"octile: Decoding cannot follow caches of Transformers {transformers.__version__}")
        cache.layers[index] = _Layer(capacity, next_position)  # a window that nothing leaves is no window
    return cache, capacity


def _hear(length, said, event, streamer):
    """Gives the streamer its tokens. Returns the length if that was the end of all sequences."""
    if event is not None:
        event.synchronize()
    if streamer is not None:
        streamer.put(said[:-1])
    return None if said[-1] else length


def _limits(stopping_criteria):
    """The end tokens, and how many tokens there may be."""
    end, longest = [], None
    for one in stopping_criteria:
        if isinstance(one, transformers.generation.EosTokenCriteria):
            end += one.eos_token_id.flatten().tolist()
        elif isinstance(one, transformers.generation.MaxLengthCriteria):
            longest = one.max_length if longest is None else min(longest, one.max_length)
        else:
            raise ValueError(
                f"octile: Decoding stops at lengths and end tokens; it does not support {type(one).__name__}"
            )
    if longest is None:
        raise ValueError("octile: Decoding needs max_new_tokens or max_length")
    return end, longest


def _check(model, ids, longest, processors, config, synced_gpus, words, compile):
    cache = words.get(_CACHE)
    known = {"attention_mask", _CACHE, "use_cache", "logits_to_keep", "cache_position", "position_ids"}
    method = config.get_generation_mode()
    reasons = [
        ("inputs_embeds" in words, "Decoding takes input_ids, not inputs_embeds"),
        (config.num_beams != 1, f"num_beams is {config.num_beams}; Decoding supports only 1"),
        (
            method not in _METHODS,
            f"Decoding does not support {method.value}, which the arguments of generate() ask for",
        ),
        (synced_gpus, "Decoding does not support synced_gpus"),
        (model.config.is_encoder_decoder, f"{type(model).__name__} is an encoder-decoder model"),
        (type(cache) is not transformers.StaticCache, 'Decoding needs cache_implementation="static"'),
        (getattr(cache, "_is_user_defined", False), f"Decoding uses its own cache; {_CACHE} was given"),
        (config.return_dict_in_generate, "return_dict_in_generate is set; Decoding returns only tokens"),
    ]
    reasons += [(getattr(config, name), f"{name} is set; Decoding returns only tokens") for name in _OUTPUTS]
    reasons += [
        (
            not isinstance(one, _PROCESSORS),
            f"Decoding does not support {type(one).__name__}, which may look at earlier tokens",
        )
        for one in processors
    ]
    rope = getattr(model.config, "rope_parameters", None) or {}
    original = (
        getattr(model.config, "original_max_position_embeddings", None) if rope.get("rope_type") == "longrope" else None
    )
    recomputes = type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation
    if original is not None and recomputes and ids.shape[1] <= original < longest:
        reasons.append((True, f"generate() recomputes all states after {original} tokens, and Decoding does not"))
    # Transformers makes its mask from a number on the host, which a graph cannot copy.
    eager = ids.is_cuda and not compile and model.config._attn_implementation == "eager"
    reasons.append((eager, 'without compile, Decoding does not support attention "eager" on a GPU; "sdpa" is faster'))
    positions = words.get("position_ids")
    if positions is not None and positions.shape != ids.shape:
        reasons.append((True, f"Decoding takes one position per token, not position_ids of {tuple(positions.shape)}"))
    reasons += [(name not in known, f"Decoding passes no {name}") for name, value in words.items() if value is not None]
    devices = {weight.device for weight in model.parameters()}
    reasons.append(
        (devices != {ids.device}, f"the model is on {', '.join(sorted(map(str, devices)))}, input_ids on {ids.device}")
    )
    for refused, why in reasons:
        if refused:
            raise ValueError(f"octile: {why}")
