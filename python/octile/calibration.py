"""Statistics of the inputs of a model's linear layers, from running it: the calibration of static scales, of smoothing
and of weight quantizers.

Statistics are kept on the device of the inputs, without transfers.
"""

import contextlib
import dataclasses
import os
import pathlib
import secrets
import stat
import warnings

import torch

from . import _reader
from .linears import as_linear, is_linear
from .quantized_input import QuantizedInput

_FORMAT = {"format": "octile-calibration", "version": "1"}
_SAMPLE_SEED = 20
_BLOCK = 128  # rows that are compared with the maxima before them, where nothing says what a sequence is
_AT_ONCE = 2**24  # values whose magnitudes are held in float32
FEW_ROWS = 1024  # kFewCalibrationRows of smooth_quant.h


@dataclasses.dataclass
class InputStatistics:
    """Statistics of the rows x that one layer has seen. A NaN or an infinity makes what it affects NaN, permanently."""

    channel_max: torch.Tensor  # (K) float32: max |x_k|
    rows: int
    second_moments: torch.Tensor | None = None  # (K, K): the sum of x x^T
    samples: torch.Tensor | None = None  # (at most `samples` rows, K): drawn evenly from all rows
    # (2) float32, on the CPU. Of one more row, the mean over its channels: the probability that |x_k| > channel_max_k,
    # and the mean square of max(|x_k| / channel_max_k - 1, 0). None: there was one sequence, or no more than 128 rows.
    excess: torch.Tensor | None = None

    @property
    def max(self):
        """max |x|, as a tensor of one element."""
        return self.channel_max.amax().reshape(1)


class _Observer:
    """Running statistics of one layer's inputs."""

    def __init__(self, features, second_moments, samples):
        self.features, self.wanted_samples, self.wants_moments = features, samples, second_moments
        self.rows, self.channel_max, self.moments, self.samples, self.keys = 0, None, None, None, None
        # As in src/calibration/calibrator.cpp: by how much rows exceed the maxima of the blocks before theirs, times the
        # rows before.
        self.excess, self.exceeding, self.compared = None, 0.0, 0
        self.generator = torch.Generator().manual_seed(_SAMPLE_SEED)

    def observe(self, x):
        # Rows of one sequence resemble each other: each is compared with the maxima of other sequences.
        length = x.shape[-2] if x.dim() > 2 else _BLOCK
        x = x.detach().reshape(-1, self.features)
        if x.shape[0] == 0:
            return
        x = torch.where(x.isfinite(), x, torch.nan)
        whole = x.shape[0] // length * length
        at_once = max(1, _AT_ONCE // (length * max(self.features, 1)))
        for part in (x[:whole].reshape(-1, length, self.features), x[whole:].unsqueeze(0)):
            if part.shape[0] and part.shape[1]:
                for blocks in part.split(at_once):
                    self._observe_maxima(blocks)
        if self.wants_moments:
            wide = x if x.dtype is torch.float64 else x.float()
            moments = (wide.T @ wide).double()
            self.moments = moments if self.moments is None else self.moments.add_(moments.to(self.moments.device))
        if self.wanted_samples:
            self._sample(x)

    def _observe_maxima(self, blocks):
        """blocks (B, L, K), in order."""
        blocks = blocks.abs().float()
        blocks = torch.where(blocks.isfinite(), blocks, torch.nan)  # beyond float32 is as bad as infinite
        if self.channel_max is None:
            self.channel_max = blocks.new_zeros(self.features)
            self.excess = self.channel_max.double()
        count, length, _ = blocks.shape
        maxima = torch.cat((self.channel_max.to(blocks.device).unsqueeze(0), blocks.amax(1))).cummax(0).values
        first = 0 if self.rows else 1  # nothing was before the first block
        rows = self.rows + length * torch.arange(first, count, dtype=torch.float64, device=blocks.device)
        by = (blocks[first:] - maxima[first:-1].unsqueeze(1)).relu()
        self.excess += (by.square().sum(1).double() * rows.unsqueeze(1)).sum(0).to(self.excess.device)
        self.exceeding += ((by > 0).sum((1, 2)) * rows).sum().to(self.excess.device)
        self.compared += (count - first) * length
        self.rows += count * length
        self.channel_max = maxima[-1].to(self.channel_max.device)

    def _sample(self, x):
        """Every row draws a number, and those of the smallest stay: each row seen is kept with the same chance."""
        keys = torch.rand(x.shape[0], generator=self.generator, dtype=torch.float64, device="cpu")
        keys, x = self._smallest(keys, x)
        if self.samples is not None:
            keys, x = self._smallest(torch.cat((self.keys, keys)), torch.cat((self.samples, x.to(self.samples))))
        self.keys, self.samples = keys, x

    def _smallest(self, keys, x):
        keys, kept = keys.topk(min(self.wanted_samples, len(keys)), largest=False, sorted=False)
        return keys, x[kept.to(x.device)]

    def statistics(self):
        channel_max = torch.zeros(self.features, device="cpu") if self.channel_max is None else self.channel_max
        return InputStatistics(channel_max, self.rows, self.moments, self.samples, self._excess())

    def _excess(self):
        if not self.compared:
            return None
        squares = torch.where(self.excess > 0, self.excess / self.channel_max.double().square(), 0)
        both = torch.stack((self.exceeding, squares.sum())) / (self.features * self.compared * self.rows)
        return both.float().cpu()


class Calibration:
    """Statistics of layers' inputs, by the names of the layers. What calibrate() fills and load() reads."""

    def __init__(self, layers=None):
        self.layers: dict[str, InputStatistics] = dict(layers or {})

    def __getitem__(self, name):
        return self.layers[name]

    def __contains__(self, name):
        return name in self.layers

    def __iter__(self):
        return iter(self.layers)

    def __len__(self):
        return len(self.layers)

    def __repr__(self):
        return f"<Calibration of {len(self)} layers, {max((s.rows for s in self.layers.values()), default=0)} rows>"

    def merge_(self, other):
        """Adds what `other` has seen; only the samples of self are kept. Raises ValueError if shapes differ."""
        for name, theirs in other.layers.items():
            ours = self.layers.get(name)
            if ours is not None and ours.channel_max.shape != theirs.channel_max.shape:
                raise ValueError(
                    f"octile: {name} has {len(ours.channel_max)} input features in one calibration and "
                    f"{len(theirs.channel_max)} in the other"
                )
        for name, theirs in other.layers.items():
            ours = self.layers.get(name)
            if ours is None:
                self.layers[name] = theirs
                continue
            device, moments, excess = ours.channel_max.device, None, None
            rows = ours.rows + theirs.rows
            if ours.excess is not None and theirs.excess is not None:
                # It falls as 1 / rows.
                excess = (ours.excess * ours.rows**2 + theirs.excess * theirs.rows**2) / rows**2
            if ours.second_moments is not None and theirs.second_moments is not None:
                moments = ours.second_moments.double() + theirs.second_moments.to(device, torch.float64)
            self.layers[name] = InputStatistics(
                torch.maximum(ours.channel_max, theirs.channel_max.to(device)),
                rows,
                moments,
                theirs.samples if ours.samples is None else ours.samples,
                excess,
            )
        return self

    def check(self, names=None):
        """Raises ValueError if a layer (of `names`, or any) has seen a NaN or an infinity, or if there is none."""
        if not self.layers:
            raise ValueError("octile: the calibration has no layers")
        chosen = self.layers if names is None else [name for name in names if name in self.layers]
        bad = [name for name in chosen if not self.layers[name].channel_max.isfinite().all()]
        if bad:
            more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
            raise ValueError(f"octile: a NaN or an infinity came into {', '.join(bad[:4])}{more} during calibration")

    def warn_of_few_rows(self, names):
        """Warns if smoothing of these layers is based on few rows."""
        rows = min((self.layers[name].rows for name in names), default=FEW_ROWS)
        if rows < FEW_ROWS:
            warnings.warn(
                f"octile: smoothing is based on {rows} calibration rows. With fewer than {FEW_ROWS:,}, unseen inputs exceed "
                "the largest values seen more often, and are clamped. Calibrate with a few thousand rows",
                stacklevel=6,  # the caller of quantize_()
            )

    def save(self, path):
        """Writes a safetensors file, which load() and `octile quantize --calibration` read; samples are not in it.

        Layers that have seen no row are left out. Only a regular file is replaced, and keeps its permissions. Raises
        ValueError if check() does, or if there is nothing to write; OSError for a device, a pipe or a dangling link, and
        if the file cannot be written.
        """
        self.check()
        tensors = {}
        for name, s in self.layers.items():
            if s.rows == 0:
                continue
            tensors[f"{name}.input_channel_max"] = s.channel_max.cpu().contiguous()
            tensors[f"{name}.input_max"] = s.max.cpu()
            tensors[f"{name}.rows"] = torch.tensor([s.rows], device="cpu")
            if s.excess is not None:
                tensors[f"{name}.input_excess"] = s.excess.cpu().contiguous()
            if s.second_moments is not None:
                tensors[f"{name}.input_second_moments"] = s.second_moments.float().cpu().contiguous()
        if not tensors:
            raise ValueError("octile: the calibration has seen no rows")
        with replacing(path) as file:
            save_safetensors(tensors, file, _FORMAT)

    @classmethod
    def load(cls, path):
        """Reads what save() wrote. Raises ValueError for any other file."""
        _safetensors()
        _reader.calibration(path)
        tensors = read_safetensors(path)
        layers = {}
        for name in sorted({key.rpartition(".")[0] for key in tensors}):
            layers[name] = InputStatistics(
                tensors[f"{name}.input_channel_max"],
                tensors[f"{name}.rows"].item(),
                tensors.get(f"{name}.input_second_moments"),
                excess=tensors.get(f"{name}.input_excess"),
            )
        return cls(layers)


@contextlib.contextmanager
def calibrate(model, *, second_moments=False, samples=256, filter=None):
    """Observes the inputs of every torch.nn.Linear and Conv1D in `model` while the block runs; returns a Calibration.

    second_moments: also sums x x^T, (K, K) per layer, which W4A16(method="feedback") needs. samples: the number of rows of
    each layer to keep, drawn uniformly, which W8A8Static(smoothing="search") needs. filter(module, name) -> bool chooses
    layers.

    Every row counts, padding included, so run batches without padding. Call the model itself, not a compiled one, which
    does not call the hooks. Raises ValueError at the end of the block if no layer has seen a row.
    """
    if not hasattr(samples, "__index__") or samples < 0:
        raise ValueError(f"octile: samples is {samples!r}, expected a whole number, 0 or more")
    observers, hooks = {}, []

    def watch(name, module):
        observer = observers[name] = _Observer(as_linear(module).in_features, second_moments, samples)

        def hook(_, arguments, keywords):
            x = arguments[0] if arguments else next(iter(keywords.values()))
            if type(x) is QuantizedInput:
                x = (x.q * x.scale.unsqueeze(1)).view(x.shape)
            # Not in autocast's type, and no inference tensor: they are added to in place later.
            with torch.inference_mode(False), torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                observer.observe(x)

        hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    calibration = Calibration()
    try:
        for name, module in model.named_modules():
            if is_linear(module) and (filter is None or filter(module, name)):
                watch(name, module)
        if not observers:
            raise ValueError("octile: the model has no torch.nn.Linear to calibrate, and no Conv1D")
        yield calibration
    finally:
        for hook in hooks:
            hook.remove()
        calibration.layers.update((name, observer.statistics()) for name, observer in observers.items())
    if all(s.rows == 0 for s in calibration.layers.values()):
        raise ValueError("octile: no linear layer has seen a row: the model was not run, or what was run is compiled")


def read_safetensors(path):
    """The tensors by name of a file that the reader has checked. Raises ValueError for what is none after all."""
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}
    except safetensors.SafetensorError as error:
        raise ValueError(f"octile: {path} is not a safetensors file: {error}") from None


def save_safetensors(tensors, path, metadata=None):
    """Writes tensors by name into a file that is there, which keeps its mode. Raises OSError where it cannot."""
    safetensors = _safetensors()
    from safetensors.torch import save_file

    mode = path.stat().st_mode
    try:
        save_file(tensors, path, metadata)
    except safetensors.SafetensorError as error:  # of a full disk, say
        raise OSError(f"octile: cannot write {path}: {error}") from None
    path.chmod(mode)  # it made a new file, its owner's alone


@contextlib.contextmanager
def replacing(path):
    """Yields an empty file for the block to fill, which then replaces `path`: completely, or not at all.

    A new file has the permissions that open() would give it; one that is replaced keeps its own. If `path` is a symbolic
    link, its target is replaced. Raises OSError for a dangling link, a folder, a device or a pipe.
    """
    path = pathlib.Path(path)
    mode = None
    if os.path.lexists(path):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"octile: cannot write {path}: it is not a regular file")
        path, mode = path.resolve(), stat.S_IMODE(status.st_mode) & 0o777
    temporary = path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}")
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666 if mode is None else mode)
    except OSError as error:
        raise type(error)(error.errno, f"octile: cannot write {path}: {error.strerror}") from None
    try:
        if mode is not None:
            os.fchmod(file, mode)  # whatever the umask
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    finally:
        os.close(file)
        temporary.unlink(missing_ok=True)


def _sync(path):
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _safetensors():
    try:
        import safetensors
    except ImportError as error:
        raise ImportError("octile: this needs the package safetensors: pip install safetensors") from error
    return safetensors
