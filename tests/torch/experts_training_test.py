"""Experts whose weights train: trained_linear(), TrainedExperts, and Int8Training of Transformers' models."""

import copy
import io

import octile
import pytest
import torch
from octile import experts as module_of
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.moe")
import transformers_zoo as zoo  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

E, K, TOKENS, SLOTS = 5, 64, 9, 3


def routed(generator, experts=E, slots=SLOTS):
    index = torch.stack([torch.randperm(experts, generator=generator)[:slots] for _ in range(TOKENS)])
    return index, torch.rand(TOKENS, slots, generator=generator)


def options(backward="16bit", rounding="nearest"):
    return octile.functional.options("out_in", True, "per_token", backward, rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("backward", ["16bit", "int8", ("int8-128", "16bit"), "int8-whole"])
def test_trained_linear(backward, dtype, generator):
    """y and the gradients equal octile.Linear over each expert's rows bit for bit."""
    n, (index, _) = 40, routed(generator)
    index[index == 2] = 3  # it gets no row
    index[0, 1] = E  # belongs to no expert
    words, leaves = {"backward": backward}, []
    for shape in ((TOKENS, K), (E, n, K), (E, n)):
        leaves.append(torch.randn(shape, generator=generator).to(dtype).requires_grad_())
    x, weight, bias = leaves
    sorted_rows = offsets, token, place = module_of.sort_by_expert(E, index)
    y = module_of.trained_linear(x, weight, sorted_rows, options(backward), bias)
    dy = torch.randn(y.shape, generator=generator).to(dtype)
    got = torch.autograd.grad(y, leaves, dy)
    of_rows = torch.zeros(len(token), K, dtype=dtype)
    for e in range(E):
        rows = slice(*offsets[e : e + 2])
        dense = octile.Linear(K, n, dtype=dtype, **words)
        dense.weight, dense.bias = (torch.nn.Parameter(t[e].detach().clone()) for t in (weight, bias))
        part = x.detach()[token[rows].long()].requires_grad_()
        expected = dense(part)
        assert torch.equal(y[rows], expected)
        of_rows[rows], dw, db = torch.autograd.grad(expected, (part, dense.weight, dense.bias), dy[rows])
        assert torch.equal(got[1][e], dw) and torch.equal(got[2][e], db)
    of_slots = torch.where((place < offsets[-1])[..., None], of_rows[place.long()], 0)
    assert torch.equal(got[0], of_slots.sum(1))
    assert not got[1][2].any() and got[1][3].any()


@pytest.mark.parametrize("backward", ["16bit", "int8"])
def test_trained_sum(backward, generator):
    """The weighted sum over slots equals that over rows, and so do its gradients."""
    (index, router), n = routed(generator), 40
    index[0, 1] = E  # belongs to no expert
    sorted_rows = offsets, token, place = module_of.sort_by_expert(E, index)
    x, weight, bias, router = (
        t.requires_grad_()
        for t in (
            torch.randn(len(token), K, generator=generator),
            torch.randn(E, n, K, generator=generator),
            torch.randn(E, n, generator=generator),
            router,
        )
    )
    leaves = x, weight, bias, router
    y = module_of.trained_linear(x, weight, sorted_rows, options(backward), bias, router)
    # The same rows, each as a token with one expert.
    one = module_of.sort_by_expert(E, torch.repeat_interleave(torch.arange(E), offsets.diff())[:, None])
    mine = int(offsets[-1])
    z = module_of.trained_linear(x[:mine], weight, one, options(backward), bias)
    z = torch.cat([z, z.new_zeros(len(token) - mine, n)])
    expected = (z[place.long()] * router[..., None]).sum(1)
    dy = torch.randn(y.shape, generator=generator)
    assert torch.allclose(y, expected, rtol=1e-5, atol=1e-4)
    got, wanted = torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, leaves, dy)
    assert torch.equal(got[0][:mine], wanted[0][:mine])
    assert torch.equal(got[1], wanted[1]) and torch.equal(got[2], wanted[2])
    assert torch.allclose(got[3], wanted[3], rtol=1e-5, atol=1e-4)


def test_gradients_that_are_not_needed(generator):
    """A tensor that needs no gradient gets none, and the others are unchanged."""
    (index, router), n = routed(generator), 40
    sorted_rows = module_of.sort_by_expert(E, index)
    values = [torch.randn(shape, generator=generator) for shape in ((TOKENS * SLOTS, K), (E, n, K), (E, n))] + [router]
    dy = torch.randn(TOKENS, n, generator=generator)
    for backward in ("16bit", "int8", ("int8", "16bit")):
        everything = None
        for wanted in range(15, 0, -1):
            asking = [bool(wanted >> i & 1) for i in range(4)]
            x, w, bias, weights = leaves = [v.clone().requires_grad_(a) for v, a in zip(values, asking, strict=True)]
            module_of.trained_linear(x, w, sorted_rows, options(backward), bias, weights).backward(dy)
            everything = everything or [t.grad for t in leaves]
            for t, expected, asked in zip(leaves, everything, asking, strict=True):
                assert torch.equal(t.grad, expected) if asked else t.grad is None


def test_no_tokens(generator):
    weight = torch.randn(E, 8, K, generator=generator, requires_grad=True)
    x, index = torch.empty(0, K, requires_grad=True), torch.empty(0, SLOTS, dtype=torch.int64)
    for backward in ("16bit", "int8"):
        y = module_of.trained_linear(x, weight, module_of.sort_by_expert(E, index), options(backward))
        dx, dw = torch.autograd.grad(y.sum(), (x, weight))
        assert y.shape == (0, 8) and dx.shape == (0, K) and not dw.any()


def test_random_numbers_are_no_other_calls(generator):
    """Expert e rounds with seed + e."""
    weight, (index, _) = torch.randn(E, 8, K, generator=generator, requires_grad=True), routed(generator)
    words = weight, module_of.sort_by_expert(E, index), options("int8", "stochastic")
    seeds = [module_of.trained_linear(torch.ones(TOKENS, K), *words).grad_fn.seed for _ in range(3)]
    seeds.append(next(octile.functional._seeds))
    assert min(abs(a - b) for i, a in enumerate(seeds) for b in seeds[:i]) >= E


@pytest.mark.parametrize("backward", ["16bit", "int8"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_int8_training(name, backward, generator):
    """Only the experts: the parameters stay the same objects, and their gradients point as the float ones do."""
    exact = zoo.make(name).train()
    model = copy.deepcopy(exact)
    parameters = dict(model.named_parameters())
    config = octile.Int8Training(backward=backward)
    report = octile.quantize_(model, config, lambda module, name: module_of.is_experts(module))
    assert report.converted and all(n.endswith("experts") for n in report.converted)
    of_biases = [m.reason for m in report.matrices if m.name.endswith("_proj_bias")]
    assert of_biases == ["a bias of experts, which is added in float"] * len(of_biases)
    assert {m.quantized for m in report.matrices if m.name.endswith("experts.down_proj")} == {True}
    after = dict(model.named_parameters())
    assert after.keys() == parameters.keys() and all(after[n] is p for n, p in parameters.items())
    assert model.state_dict().keys() == exact.state_dict().keys()
    ids = torch.randint(0, 90, (2, 16), generator=generator)
    for one in (model, exact):
        one(ids, labels=ids).loss.backward()
    of_experts = [n for n in after if ".experts." in n]
    assert of_experts
    for n, p in exact.named_parameters():
        assert (after[n].grad is None) == (p.grad is None)
        if p.grad is not None and n in of_experts:
            got, expected = after[n].grad.double().flatten(), p.grad.double().flatten()
            assert torch.nn.functional.cosine_similarity(got, expected, dim=0) > 0.98, n
    with pytest.warns(UserWarning, match="experts that train in int8 already"):
        octile.quantize_(model, config, lambda module, name: module_of.is_experts(module))
    for one in (model, exact):
        octile.quantize_(one.eval(), octile.W8A8Dynamic())
    assert torch.equal(zoo.logits(model, name), zoo.logits(exact, name))


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def trained(request):
    """A model's first trained experts, and the arguments of a call in which some slots have no expert."""
    model = zoo.make(request.param).train()
    octile.quantize_(model, octile.Int8Training(backward="int8"), lambda module, _: module_of.is_experts(module))
    experts = next(m for m in model.modules() if isinstance(m, module_of.TrainedExperts))
    generator = torch.Generator().manual_seed(6)
    index, weights = routed(generator, experts.num_experts, 2)
    index[0, 1], index[4, 0] = experts.num_experts, -1
    return experts, torch.randn(TOKENS, experts._input()[0], generator=generator), index, weights


def results(experts, x, index, weights, call=None, passes=1):
    """y and the gradients of x, the router's weights and the parameters."""
    for p in experts.parameters():
        p.grad = None
    x, weights = (t.detach().clone().requires_grad_() for t in (x, weights))
    for _ in range(passes):
        y = (experts if call is None else call)(x, index, weights)
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))
    return [y.detach(), x.grad, weights.grad, *(p.grad for p in experts.parameters())]


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


def test_copies(trained):
    experts, *arguments = trained
    expected, file = results(*trained), io.BytesIO()
    torch.save(experts, file)
    file.seek(0)
    for other in (copy.deepcopy(experts), torch.load(file, weights_only=False)):
        assert type(other) is module_of.TrainedExperts and same(results(other, *arguments), expected)
    torch.nn.init.zeros_(other.down_proj)
    other.load_state_dict(experts.state_dict())
    assert same(results(other, *arguments), expected)


def test_passes(trained):
    """Recomputed, accumulated, without gradients, and under anomaly detection: rows without an expert have no NaN."""
    experts, x, index, weights = trained
    expected = results(*trained)
    recomputed = results(*trained, lambda *arguments: checkpoint(experts, *arguments, use_reentrant=False))
    assert same(recomputed, expected)
    twice = results(*trained, passes=2)
    assert same(twice[1:], [g + g for g in expected[1:]])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(experts(x, index, weights), expected[0])
    for rows in (len(index) * index.shape[1], len(index)):
        for columns in {p.shape[-1] for p in experts.parameters()} | {x.shape[1]}:
            for _ in range(4):
                torch.full((rows, columns), torch.nan)  # freed memory
    with torch.autograd.set_detect_anomaly(True):
        assert same(results(*trained), expected)


def test_is_differentiable_once(trained):
    experts, x, index, weights = trained
    x = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(experts(x, index, weights).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="a quantized layer can be differentiated once"):
        (dx * x).sum().backward()


def test_autocast(trained):
    experts, *arguments = trained
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = results(experts, *arguments)
    assert got[0].dtype is torch.bfloat16
    for g, e in zip(got, results(*trained), strict=True):
        assert torch.nn.functional.cosine_similarity(g.flatten().double(), e.flatten().double(), dim=0) > 0.99
        assert g is got[0] or g.dtype is torch.float32


def test_compiles(trained):
    """One graph for any number of tokens, with the same bits."""
    experts, x, index, weights = trained
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (9, 4, 1):
        arguments = x[:n], index[:n], weights[:n]
        assert same(results(experts, *arguments, compiled), results(experts, *arguments))


class Net(torch.nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = copy.deepcopy(experts)

    def forward(self, x, index, weights):
        return self.experts(x, index, weights) + x


def sharded(rank, port):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        model = zoo.make("qwen3_moe").train()
        octile.quantize_(model, octile.Int8Training(backward="int8"), lambda module, _: module_of.is_experts(module))
        experts = next(m for m in model.modules() if isinstance(m, module_of.TrainedExperts))
        calls = []
        for seed in (1, 2):
            generator = torch.Generator().manual_seed(seed)
            index, weights = routed(generator, experts.num_experts, 2)
            calls.append((torch.randn(TOKENS, experts._input()[0], generator=generator), index, weights))
        alone = [results(Net(experts), *call) for call in calls]
        model = Net(experts)
        for module in (model.experts, model):
            fully_shard(module, mesh=mesh)
        got = results(model, *calls[rank])
        assert same(got[:3], alone[rank][:3])
        for g, a, b in zip(got[3:], alone[0][3:], alone[1][3:], strict=True):
            assert torch.equal(g.full_tensor(), (a + b) / 2)  # FSDP2 averages
    finally:
        dist.destroy_process_group()


def test_fsdp(start_processes):
    """FSDP2 gathers the experts in float, and their bits equal those of one process."""
    start_processes(sharded, (), 2)
