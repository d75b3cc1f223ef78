"""Linear-time attention: a feature map and the algorithms over it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from kernelformer.attention import State, read, step
from kernelformer.attention.dispatch import attend, takes_plain
from kernelformer.attention.positive import EMPTY
from kernelformer.attention.state import MadeBy, Prepared, empty_sums
from kernelformer.contract import compute_dtype, no_autocast
from kernelformer.errors import choice, flag, fraction, integer, positive_int
from kernelformer.feature_maps import FeatureMap
from kernelformer.modules.bias import FADES, NEAR, BiasedAttention
from kernelformer.modules.checks import Call, check_near, check_scale, config_mismatch, tensor_mismatch
from kernelformer.modules.context import needs_whole
from kernelformer.modules.core import AttentionCore
from kernelformer.modules.window import Far, NearFarAttention


class KernelCore(AttentionCore):
    """Linear-time attention through a feature map.

        out_i = sum_j phi(q_i) . phi(k_j) v_j / sum_j phi(q_i) . phi(k_j)          (Performer, Eq. 4)

    The core prepares the map's tensors for a call and makes the states. What attends with them is `_attend_unbiased`
    and `_step_unbiased`, or a part that it owns, with the same arguments and results: `biased` where there is a bias.

    Args:
        feature_map: phi.
        normalize: divide by the sum of the weights; default as the map's paper does.
        window: tokens on each side of a query, its own included, that are attended to exactly, by softmax; the map does
            the others. None: the map does all.
        sinks: number of first visible tokens that every query attends to exactly.
        beta: with a window or sinks, the logarithm of a factor of the map's part, one per head: ``learned`` from 0, or
            ``zero``.
        near_scale: of q . k in the exact part; default: the scale, or 1 / sqrt(D) for a map with a scale of its own.
        attention_dropout: the share of the exact part's weights that training sets to 0, the others being divided by
            what is left.

    The others are those of `AttentionCore`.
    """

    near_alone = False  # leave the map's part out, to see what the exact one is good for
    # The map's tensors of the last stream: parameters as they are, or what follows from them. They are here and not in
    # the states, of which there may be many.
    _prepared: Prepared | None = None
    splits = True
    takes_loops = True
    takes_bias = True
    causal_way = "landmarks='learned'"  # what to use instead of landmarks that see the whole sequence

    def __init__(
        self,
        method: str,
        feature_map: FeatureMap,
        *,
        normalize: bool | None = None,
        window: int | None = None,
        sinks: int = 0,
        beta: str = "learned",
        near_scale: float | None = None,
        attention_dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(method, head_dim=feature_map.head_dim, num_heads=feature_map.num_heads, **options)
        self._modules["feature_map"] = feature_map
        self.normalize = feature_map.normalized if normalize is None else flag("normalize", normalize)
        if feature_map.aligns and not self.normalize:
            raise ValueError("align=True moves the keys, which only normalization undoes; got normalize=False.")
        self.window = None if window is None else positive_int("window", window)
        self.sinks = integer("sinks", sinks, at_least=0)
        self.near_scale = None if near_scale is None else check_scale(near_scale)
        self.attention_dropout = fraction("attention_dropout", attention_dropout)
        choice("beta", beta, ("learned", "zero"))
        self.near: NearFarAttention | None = None
        if self.window is not None or self.sinks:
            self.near = NearFarAttention(method, window=self.window or 0, sinks=self.sinks, scale=self.near_scale)
        near = {} if self.near is None else {"window": self.window, "sinks": self.sinks}
        exact: dict[str, Any] = {"near_scale": self.near_scale, "dropout": self.attention_dropout}
        check_near(method, near, normalize=self.normalize, aligns=feature_map.aligns, **exact)
        self.beta = nn.Parameter(torch.zeros(self.num_heads)) if near and beta == "learned" else None
        whole = feature_map.sees_sequence  # landmarks come from the whole row, so that one output depends on all others
        self.takes_bias = self.takes_bias and self.normalize
        self.takes_dropout, self.takes_segments, self.mixes_queries = bool(near), not whole, whole
        self.export_refusal = self.export_refusal or ("takes its landmarks from the tokens" if whole else "")
        # Key heads with maps of their own, and how many heads a state has at least.
        self.map_heads, self.state_heads = feature_map.num_key_heads, feature_map.heads

    @property
    def feature_map(self) -> FeatureMap:
        """The map; found before `nn.Module.__getattr__` is asked, which would take five times as long."""
        return cast(FeatureMap, self._modules["feature_map"])

    @property
    def has_near(self) -> bool:  # type: ignore[override]
        """True if some keys are attended to exactly."""
        return self.near is not None

    @property
    def biased(self) -> BiasedAttention:
        """The part that attends with a relative bias, through the map that the core has now."""
        # Landmarks have to be chosen among normalized tokens.
        inside = self.normalize_qk and not self.feature_map.sees_sequence
        return BiasedAttention(self.feature_map, normalize_qk=inside)

    @property
    def feature_dim(self) -> int:
        """M, the width of phi."""
        return self.feature_map.feature_dim

    def resample(self, draw: int | None = None) -> None:
        """Go to the next draw of the feature map, or to number ``draw``."""
        self.feature_map.resample(draw)

    def covariances(self) -> Tensor:
        """Covariance of the spectral distribution, (H, C, D, D) for C components (KL-Transformer, Tables 4, 9-12).

        A mixture's own where the map has one; of the frequencies as a sample, C = 1, where it has none.
        """
        return self.feature_map.covariances()

    def eigenvalues(self) -> Tensor:
        """Eigenvalues of the `covariances`, (H, C, D), ascending."""
        with no_autocast(self.feature_map.seed.device.type):
            values: Tensor = torch.linalg.eigvalsh(self.covariances())
        return values

    def _by_query_head(self, call: Call) -> bool:
        """True if keys are repeated for every query head: each has its own bias, or its own slope of it."""
        assert call.bias is not None
        return self.near is None or not call.is_causal or call.bias.slope is not None

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name != "_prepared"}

    def map_tensors(self, call: Call) -> Sequence[Tensor]:
        """The map's tensors for a call, with a bias for keys that are repeated for every query head.

        A stream keeps those of the call before while they are right. With gradients they belong to a graph, and in a
        compiled step to its weights: both make them each time.
        """
        phi, biased = self.feature_map, call.bias is not None and self._by_query_head(call)
        keeps = (call.streams or call.state is not None) and not torch.is_grad_enabled()
        if keeps and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active():
            kind = compute_dtype(call.query.dtype), call.query.device, torch.is_inference_mode_enabled()
            how = (phi, *kind, call.scale, biased, phi.seed_number, phi.draw_number)
            kept = self._prepared  # read once: a stream in another thread may put its own here at any time
            if call.state is None or kept is None or not kept.made_from(how):
                tensors = phi.prepare(call.query, call.key, call.key_mask, call.scale)
                made = tuple(phi.for_query_heads(tensors) if biased else tensors)
                self._prepared = kept = Prepared.of(made, phi, how)
            return kept.tensors
        real = call.real_queries if phi.sees_sequence else None
        tensors = phi.prepare(call.query, call.key, call.key_mask, call.scale, real)
        return phi.for_query_heads(tensors) if biased else tensors

    def _attend(self, call: Call) -> tuple[Tensor, State | None]:
        phi = self.feature_map
        if phi.aligns:
            query, key = phi.align(call.query, call.key, call.key_mask, call.real_queries)
            call = replace(call, query=query, key=key)
        tensors = self.map_tensors(call)
        near = self.near
        after: Sequence[Tensor] | None
        if near is None and call.bias is None:
            out, after = self._attend_unbiased(call, tensors)
        else:
            biased = None if call.bias is None else call.bias.algorithm
            plain = takes_plain(call.algorithm or biased, (call.query, call.key, call.value))
            if near is not None:
                out, after = near.attend(*self._with_far(call, tensors), plain=plain)
            else:
                out, after = self.biased.attend(call, tensors, plain=plain)
        return out, self._state(after, call) if call.streams and after is not None else None

    def _with_far(self, call: Call, tensors: Sequence[Tensor]) -> tuple[Call, Far | None]:
        """A call with keys for each head of the sums, and its far part."""
        if self.near_alone:
            return call, None
        phi, by_query = self.feature_map, call.bias is not None and self._by_query_head(call)
        heads = self.num_heads if by_query else max(call.key.shape[1], self.state_heads)
        repeats = heads // call.key.shape[1]
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, 1) for x in (call.key, call.value))
            call = replace(call, key=key, value=value)
        return call, Far(phi.spread_spec_id if by_query else phi.spec_id, tensors, self.beta)

    def _step(self, call: Call) -> tuple[Tensor, State]:
        dtype = compute_dtype(call.query.dtype)
        if call.query.dtype != dtype:
            query, key, value = (x.to(dtype) for x in (call.query, call.key, call.value))
            call = replace(call, query=query, key=key, value=value)
        tensors = self.map_tensors(call)
        after: Sequence[Tensor]
        buffers: object | None = None
        if self.near is not None:
            out, after, buffers = self.near.step(*self._with_far(call, tensors))
        elif call.bias is None:
            out, after = self._step_unbiased(call, tensors)
        else:
            out, after, buffers = self.biased.step(call, tensors)
        return out, self._state(after, call, buffers)

    def _attend_unbiased(self, call: Call, tensors: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor] | None]:
        """Attend without a bias: (B, H, L, E), and of a causal call the tensors of the state after it."""
        return attend(
            call.query,
            *self._per_map_head(call.key, call.value),
            spec=self.feature_map.spec_id,
            tensors=tensors,
            scale=call.scale,
            key_mask=call.key_mask,
            normalize=self.normalize,
            is_causal=call.is_causal,
            state=None if call.state is None else call.state.tensors,
            streams=call.streams,
            algorithm=call.algorithm,
        )

    def _step_unbiased(self, call: Call, tensors: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
        """Attend with one token without a bias: (B, H, 1, E), and the tensors of the state after it."""
        return step(
            self.feature_map.spec,
            tensors,
            call.query,
            *self._per_map_head(call.key, call.value),
            self._before(call),
            scale=call.scale,
            key_mask=call.key_mask,
            normalize=self.normalize,
        )

    def remember(self, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None) -> State:
        """Summarize a context for `recall` by sums of constant size, or by all of it where landmarks see queries."""
        if self.near is not None:
            near = f"window={self.window} and sinks={self.sinks}"
            raise ValueError(
                f"{self.method!r} with {near} has near keys, and a context to remember has none: build the core of a "
                f"cross-attention without them."
            )
        if self.feature_map.sees_sequence:
            return super().remember(key, value, key_mask=key_mask)
        needs_whole("remember", "attend to the context over ranks, in one call")
        query = key.new_zeros(key.shape[0], self.num_heads, *key.shape[2:])
        result = self.forward(query, key, value, is_causal=True, key_mask=key_mask, return_state=True)
        assert isinstance(result, tuple)
        state = result[1]
        return replace(state, made_by=(*state.made_by, ("remembers", key.shape[2])))

    def _maker(self) -> MadeBy:
        return self._made_by(self.scale)

    def recall(self, query: Tensor, memory: State) -> Tensor:
        """Attend to a remembered context, without a bias: (B, H, L, D) -> (B, H, L, E). Cost: O(L M (D + E))."""
        if self.feature_map.sees_sequence:
            return super().recall(query, memory)
        self._check_memory(memory)
        sample = query[:, :1, :1]  # in place of keys, of which none are needed
        call = self._accept(Call(query=query, key=sample, value=sample, scale=self.scale, state=memory))
        query, main = call.query, memory.tensors[1]
        if main.shape[0] != query.shape[0] or main.device != query.device:
            raise ValueError(
                f"the memory has {main.shape[0]} samples on {main.device}, got {query.shape[0]} on {query.device}."
            )
        rows, _ = self._normalize_qk(query.to(main.dtype), sample, None)
        with no_autocast(query.device.type):
            spec, tensors = self.feature_map.spec, self.map_tensors(replace(call, query=rows))
            out = read(spec, tensors, rows, memory.tensors, scale=self.scale, normalize=self.normalize)
        return out.to(query.dtype)

    def refusal(self, causal: bool) -> ValueError | None:
        """Return the error for a causal call if landmarks see the whole sequence, or None."""
        return self._not_causal("is_causal=True") if causal and self.feature_map.sees_sequence else None

    def _stream_refusal(self, what: str) -> ValueError | None:
        return self._not_causal(what) if self.feature_map.sees_sequence else None

    def _not_causal(self, what: str) -> ValueError:
        return ValueError(
            f"{self.method!r} takes its landmarks from the whole sequence, later tokens included, but {what} was asked "
            f"for; use {self.causal_way}, which do not see it."
        )

    def _fits(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[object, ...]:
        if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
            return ()
        device = query.device.type
        if torch.compiler.is_compiling() or (device != "meta" and torch.is_autocast_enabled(device)):
            return ()
        kinds = (query.dtype, key.dtype, value.dtype, query.device, key.device, value.device)
        own = (self.normalize, self.normalize_qk, self.window, self.sinks, self.near_scale)
        return (query.shape, key.shape, value.shape, kinds, self.method, self.feature_map.stamp, scale, own)

    def _normalizes_itself(self, call: Call) -> bool:
        return call.bias is not None and self.near is None and not call.in_stream and self.biased.normalize_qk

    def _per_map_head(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Repeat grouped keys and values for each head of the map: a map per query head sees them anew."""
        heads = max(key.shape[1], self.state_heads)
        if key.shape[1] != heads:
            key = key.repeat_interleave(heads // key.shape[1], 1)
        if value.shape[1] != heads:  # aligned keys are repeated already
            value = value.repeat_interleave(heads // value.shape[1], 1)
        return key, value

    def _before(self, call: Call) -> Sequence[Tensor]:
        """The tensors of the state before a call; those of no tokens where it has none."""
        if call.state is not None:
            return call.state.tensors
        lead = (call.key.shape[0], max(call.key.shape[1], self.state_heads))
        return tuple(empty_sums(self.feature_map.spec, lead, self.feature_dim, call.value.shape[-1], call.value))

    def extra_repr(self) -> str:
        """The settings, for printing a model."""
        near = f", window={self.window}, sinks={self.sinks}" if self.near is not None else ""
        return super().extra_repr() + near

    def _made_by(self, scale: float) -> MadeBy:
        own: dict[str, object] = {"normalize": self.normalize, "normalize_qk": self.normalize_qk, "scale": scale}
        if self.near is not None:
            own |= {"window": self.window, "sinks": self.sinks, "near_scale": self.near_scale}
        return (("method", self.method), *self.feature_map.identity.items(), *own.items())

    def _made_for(self, call: Call) -> MadeBy:
        made_by = self._made_by(call.scale)
        if self.near is not None:
            return made_by + self.near.made_by(call)
        return made_by if call.bias is None else made_by + self.biased.made_by(call)

    def _forget(self, state: State, samples: Tensor) -> State:
        """Sums over nothing are zero, and their logarithm or scale, which comes first, EMPTY; near keys are hidden."""
        if self.near is not None:
            return self.near.forget(state, samples)
        values = [0.0] * len(state.tensors)
        if len(values) > (3 if NEAR in dict(state.made_by) else 0):
            values[0] = EMPTY
        return state.fill(samples, values)

    def _misfit(self, call: Call, state: State) -> str | None:
        theirs, ours = dict(state.made_by), dict(self._made_by(call.scale))
        near = self.near
        biased = call.bias is not None and near is None
        if near is not None:
            ours |= dict(near.made_by(call))
        if theirs["method"] == self.method and (NEAR in theirs) != biased:
            made, here = ("without", "one") if biased else ("with", "none")
            return f"the state was made {made} a bias, this call has {here}"
        for own in (NEAR, FADES):
            theirs.pop(own, None)
        problem = config_mismatch(theirs, ours)
        if problem:
            return problem
        main, by_query = state.tensors[-2 if biased else 1], call.bias is not None and self._by_query_head(call)
        heads = self.num_heads if by_query else max(call.key.shape[1], self.state_heads)
        needed = (call.key.shape[0], heads, main.shape[2] if biased else self.feature_dim, call.value.shape[-1])
        return tensor_mismatch(main, needed, call.query)


class WildcatCore(KernelCore):
    """`KernelCore` with outputs clipped to the range of the values, which all averages of them are in.

    The weights of landmarks can be negative, so that a poor approximation leaves that range. Where near weights are
    dropped in training, and what is left is divided by its share, nothing is clipped.
    """

    causal_way = "'skyformer' with kernel='softmax' and landmarks='learned', or a method such as 'favor+'"

    def attention_matrix(self, query: Tensor, key: Tensor, **how: Any) -> Tensor:
        """The weights (B, H, L, S) as they are, signed, with sum 1; see `AttentionCore.attention_matrix`."""
        plain = copy.copy(self)  # unit vectors are no values, whose range would say anything
        plain.__class__ = KernelCore  # type: ignore[assignment]
        return KernelCore.attention_matrix(plain, query, key, **how)

    def _attend(self, call: Call) -> tuple[Tensor, State | None]:
        out, after = super()._attend(call)
        if call.dropout:
            return out, after
        lowest, highest = value_range(call.value.detach(), call.key_mask, self.num_heads)
        bounds = lowest.to(out.dtype), highest.to(out.dtype)
        return (torch.clamp if out.requires_grad else torch.clamp_)(out, *bounds), after


def value_range(value: Tensor, key_mask: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    """The least and the largest value of the visible keys, (B, H, 1, E) each; 0 where there is none.

    Wider by the rounding of an average, so that clipping stops no gradient where it would change nothing else.
    """
    if value.shape[2] == 0:
        nothing = value.new_zeros(value.shape[0], heads, 1, value.shape[3])
        return nothing, nothing
    bounds = []
    for empty, pick in ((torch.inf, torch.amin), (-torch.inf, torch.amax)):
        visible = value if key_mask is None else value.masked_fill(~key_mask[:, None, :, None], empty)
        bound = pick(visible, 2, keepdim=True)
        if key_mask is not None:
            bound = bound.masked_fill(~key_mask.any(1)[:, None, None, None], 0)
        bounds.append(bound.to(compute_dtype(bound.dtype)).repeat_interleave(heads // value.shape[1], 1))
    rounding = 8 * torch.finfo(bounds[0].dtype).eps * torch.maximum(bounds[0].abs(), bounds[1].abs())
    return bounds[0] - rounding, bounds[1] + rounding
