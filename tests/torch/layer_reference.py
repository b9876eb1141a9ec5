"""A whole quantized layer computed with op_reference.py: the results of forward and backward, and their tolerances."""

import numpy as np
import op_reference as reference
import torch


class Expected:
    """x (M, K), w (N, K) as (OUT, IN), b (N) or None, dy (M, N); `dtype` is of y, dX and dB."""

    def __init__(self, x, w, b=None, per_token=True, per_channel=True, dtype=None):
        self.dtype, self.device = dtype or x.dtype, x.device
        self.xq, self.xs = reference.quantize(reference.wide(x), 1 if per_token else None)
        self.wq, self.ws = reference.quantize(reference.wide(w), 1 if per_channel else None)
        self.b = None if b is None else reference.wide(b.detach().to(self.dtype))

    def y(self):
        return reference.narrow(reference.linear(self.xq, self.xs, self.wq, self.ws, self.b), self.dtype)

    def assert_y(self, y):
        assert y.dtype == self.dtype
        assert torch.equal(y.detach().cpu(), self.y())

    def assert_dx(self, dx, dy, product):
        if product != "16bit":
            self._assert_int8(dx, self._int8(dy, product)[0], dy.dtype)
        else:
            w = self.wq.astype(np.float64) * self.ws.reshape(-1, 1).astype(np.float64)
            self._assert_sum(dx, _f64(dy) @ w, np.abs(_f64(dy)) @ np.abs(w), dy.shape[1], dy.dtype)

    def assert_dw(self, dw, dy, product):
        """dw (N, K)."""
        if product != "16bit":
            self._assert_int8(dw, self._int8(dy, product)[1], dw.dtype)
        else:
            x = self.xq.astype(np.float64) * self.xs.reshape(-1, 1).astype(np.float64)
            exact, magnitudes = _f64(dy).T @ x, np.abs(_f64(dy)).T @ np.abs(x)
            self._assert_sum(dw, exact, magnitudes, dy.shape[0], dy.dtype)

    def assert_db(self, db, dy):
        self._assert_sum(db, _f64(dy).sum(0), np.abs(_f64(dy)).sum(0), dy.shape[0], dy.dtype)

    def _int8(self, dy, product):
        block = {"int8": 256, "int8-128": 128, "int8-whole": 0}[product]
        return reference.backward_int8(reference.wide(dy), self.wq, self.ws, self.xq, self.xs, block=block)

    def _assert_int8(self, actual, expected, dtype):
        # Rounded to the kernel's type first, where the parameter's is another.
        assert torch.equal(actual.detach().cpu(), reference.narrow(expected, dtype).to(actual.dtype))

    def _assert_sum(self, actual, exact, magnitudes, terms, dy_dtype):
        """The contract's bound; the last rounding is to the narrower of dY's and the result's type.

        A dW in float32 of a 16-bit dY is rounded to float32 alone, but on a GPU its dequantized operand is rounded to
        dY's type: the wider bound is taken.
        """
        reference.assert_sum(actual, exact, magnitudes, terms, dy_dtype, self.device)


def _f64(t):
    return t.detach().cpu().double().numpy()
