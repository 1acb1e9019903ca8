//! Memory of block-sparse attention: the indexer and its scores.

use shardpack_formats::{Spec, memory::MAX_INDEX_SCORES};

use super::{EngineLoad, RankExtents};

/// KV heads on a rank of a layer with block-sparse attention, and the width of its indexer keys.
fn index(spec: &Spec, part: &RankExtents, layer: usize) -> Option<[u64; 2]> {
    let index = spec.attention.block_sparse.as_ref().filter(|_| spec.layers[layer].block_sparse)?;
    let heads = part.key / u64::from(spec.attention.head_dim).max(1);
    (heads > 0).then_some([heads, u64::from(index.width)])
}

/// Indexer keys: every rank with heads holds all of them.
pub(super) fn keys(spec: &Spec, part: &RankExtents, layer: usize, load: &EngineLoad) -> u64 {
    index(spec, part, layer).map_or(0, |[_, width]| load.tokens * load.kv.indexer_bytes(width))
}

/// Floats for each row of a step.
pub(super) fn working(spec: &Spec, part: &RankExtents, layer: usize) -> u64 {
    let Some([heads, width]) = index(spec, part, layer) else { return 0 };
    let kept = spec.attention.block_sparse.as_ref().map_or(0, |blocks| u64::from(blocks.top_k));
    // Indexer queries before and after RoPE, the indexer key, and the top-k block indices.
    heads * (2 * width + kept) + width
}

/// Floats of the scores of one head's queries with all keys; rows beyond the engine's bound follow
/// one after the other. None while all blocks are selected.
pub(super) fn scores(spec: &Spec, part: &RankExtents, layer: usize, load: &EngineLoad) -> u64 {
    let Some(blocks) = &spec.attention.block_sparse else { return 0 };
    let all = u64::from(blocks.tokens) * u64::from(blocks.top_k);
    if index(spec, part, layer).is_none() || load.tokens <= all {
        return 0;
    }
    (load.step_tokens * load.tokens).min(MAX_INDEX_SCORES as u64)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use shardpack_formats::memory::{KvType, MAX_INDEX_SCORES};

    use crate::{
        plan::{ConvertOptions, Plan, RankMemory, memory::EngineLoad},
        source::Source,
    };

    /// Of the reference model by hand: four layers with keys and values of two heads of 32, two of
    /// them with indexer keys of 32. In groups of 64 query heads are sharded by twos, so of three
    /// ranks the last one has none.
    #[test]
    fn caches_are_keys_values_and_keys_of_the_index() {
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/models/minimax_m3_vl_text");
        let source = Source::open(Path::new(model)).unwrap();
        let check = |ranks, heads: &[u64]| {
            let plan = Plan::new(&source, ConvertOptions::new("unused".into(), ranks)).unwrap();
            let of = |rank, kv| {
                let load = EngineLoad { tokens: 512, sequences: 2, step_tokens: 64, kv };
                RankMemory::of(&plan.normalised.spec, &plan.layout, (rank, 0), &load)
            };
            for (rank, heads) in (0..ranks).zip(heads) {
                let floats = of(rank, KvType::F32);
                let any = u64::from(*heads > 0);
                assert_eq!(floats.cache_bytes, 512 * (4 * 2 * heads * 128 + any * 2 * 128));
                // Keys of an index are no integers.
                let eight = of(rank, KvType::Q8);
                assert_eq!(eight.cache_bytes, 512 * (4 * 2 * heads * 36 + any * 2 * 64));
            }
        };
        let scores = |tokens| {
            let plan = Plan::new(&source, ConvertOptions::new("unused".into(), 1)).unwrap();
            let load = EngineLoad { tokens, sequences: 1, step_tokens: 64, kv: KvType::F32 };
            let part = RankMemory::of(&plan.normalised.spec, &plan.layout, (0, 0), &load);
            part.working_bytes
        };
        // While two blocks of eight are all there is, nothing is scored; then 64 rows are, with all
        // keys, up to a bound.
        assert_eq!(scores(24) - scores(16), 64 * 24 * 4);
        assert_eq!(scores(1 << 20) - scores(16), MAX_INDEX_SCORES as u64 * 4);
        check(1, &[2]);
        check(2, &[1, 1]);
        check(3, &[1, 1, 0]);
    }
}
