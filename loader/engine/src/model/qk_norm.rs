//! Normalisation of queries and keys within attention (QK norm).

use shardpack_formats::spec::{self, QkNorm};

use super::{
    LoadError,
    load::{Loader, TensorSlice},
    norm::{self, Norm},
    shard::Heads,
    step::ForwardPass,
};
use crate::backend::{Backend, Columns, SquareSums, StepError};

/// Something of queries, and the same of keys.
#[derive(Clone, Copy)]
pub(super) struct QueriesAndKeys<T> {
    /// Of queries, `[tokens, heads, head_dim]`.
    pub(super) q: T,
    /// Of keys, `[tokens, kv_heads, head_dim]`.
    pub(super) k: T,
}

impl<T> QueriesAndKeys<T> {
    /// The same of both.
    pub(super) fn map<R>(self, work: impl Fn(T) -> R) -> QueriesAndKeys<R> {
        QueriesAndKeys { q: work(self.q), k: work(self.k) }
    }
}

/// The norms of queries and keys of one layer.
pub(super) enum QueryKeyNorm<B: Backend> {
    /// None.
    None,
    /// Each head by itself before the rotary embedding (Qwen 3).
    PerHead(QueriesAndKeys<Norm<B>>),
    /// Each head by itself after the rotary embedding (Hunyuan).
    PerHeadAfterRope(QueriesAndKeys<Norm<B>>),
    /// All heads together before the rotary embedding (`OLMo` 2): one more all-reduce.
    AllHeads(QueriesAndKeys<Norm<B>>),
    /// Each head by itself after the rotary embedding, with a gain of ones (Llama 4).
    UnscaledAfterRope(B::Vector),
}

impl<B: Backend> QueryKeyNorm<B> {
    /// The norms of this form for the columns of queries and keys that are held here.
    pub(super) fn load(
        loader: &Loader<'_, B>,
        form: &spec::Attention,
        module: &str,
        columns: QueriesAndKeys<&TensorSlice>,
    ) -> Result<Self, LoadError> {
        let one_head = TensorSlice::whole(form.head_dim as usize);
        let norms = |names: [&str; 2], columns: QueriesAndKeys<&TensorSlice>| {
            let norm = |name: &str, width| Norm::load(loader, &format!("{module}.{name}"), width);
            let [q, k] = names;
            Ok::<_, LoadError>(QueriesAndKeys { q: norm(q, columns.q)?, k: norm(k, columns.k)? })
        };
        let per_head = QueriesAndKeys { q: &one_head, k: &one_head };
        Ok(match form.qk_norm {
            QkNorm::None => Self::None,
            QkNorm::Head => Self::PerHead(norms(["q_norm", "k_norm"], per_head)?),
            QkNorm::HeadAfterRope => {
                Self::PerHeadAfterRope(norms(["query_layernorm", "key_layernorm"], per_head)?)
            }
            QkNorm::Full if columns.q.held.is_empty() => Self::None,
            QkNorm::Full => Self::AllHeads(norms(["q_norm", "k_norm"], columns)?),
            QkNorm::PlainAfterRope => {
                Self::UnscaledAfterRope(loader.backend.ones(form.head_dim as usize))
            }
        })
    }

    /// Queries and keys as the rotary embedding reads them.
    pub(super) fn before_rope(
        &self,
        pass: &ForwardPass<'_, B>,
        form: &spec::Attention,
        heads: &Heads,
        qk: QueriesAndKeys<B::Tensor>,
    ) -> Result<QueriesAndKeys<B::Tensor>, StepError> {
        let backend = pass.backend;
        let norms = match self {
            Self::None | Self::PerHeadAfterRope(_) | Self::UnscaledAfterRope(_) => return Ok(qk),
            Self::PerHead(norms) => return Ok(norms.apply(backend, &qk)),
            Self::AllHeads(norms) => norms,
        };
        let head_dim = form.head_dim as usize;
        // A key-value head that several ranks hold counts once.
        let (held, owned) = (&heads.kv, &heads.kv_owned);
        let owned = if owned.is_empty() {
            0..0
        } else {
            (owned.start - held.start) * head_dim..(owned.end - held.start) * head_dim
        };
        let QueriesAndKeys { q, k } = qk;
        let sums = backend.square_sums(&[
            Columns { x: &q, columns: 0..heads.q.len() * head_dim },
            Columns { x: &k, columns: owned },
        ]);
        let sums = backend.all_reduce(sums, pass.ranks)?;
        let of = |part: usize, heads: u32| SquareSums {
            sums: &sums,
            part,
            full_width: heads as usize * head_dim,
        };
        Ok(QueriesAndKeys {
            q: backend.norm_by_sums(q, &norms.q.params(), of(0, form.heads)),
            k: backend.norm_by_sums(k, &norms.k.params(), of(1, form.kv_heads)),
        })
    }

    /// Queries and keys as attention reads them; `is_rotated` says whether the layer has a rope.
    pub(super) fn after_rope(
        &self,
        pass: &ForwardPass<'_, B>,
        is_rotated: bool,
        qk: QueriesAndKeys<B::Tensor>,
    ) -> QueriesAndKeys<B::Tensor> {
        match self {
            Self::PerHeadAfterRope(norms) => norms.apply(pass.backend, &qk),
            Self::UnscaledAfterRope(ones) if is_rotated => {
                let params = norm::without_gain(pass.spec, ones);
                qk.map(|x| pass.backend.norm(&x, &params))
            }
            _ => qk,
        }
    }
}

impl<B: Backend> QueriesAndKeys<Norm<B>> {
    fn apply(&self, backend: &B, qk: &QueriesAndKeys<B::Tensor>) -> QueriesAndKeys<B::Tensor> {
        QueriesAndKeys { q: self.q.apply(backend, &qk.q), k: self.k.apply(backend, &qk.k) }
    }
}
