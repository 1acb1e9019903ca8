//! Memory of attention with compressed KV entries: the window of near tokens, the entries, and the
//! compressors' state.

use shardpack_formats::{
    Spec,
    spec::{CompressedAttention, CompressedKv},
};

use super::{EngineLoad, F32_BYTES, PAGE_TOKENS, RankExtents};

/// Rows of compressor input that a sequence keeps in addition to those of incomplete entries.
const SPARE_ROWS: u64 = 8;

/// Widths of a token's compressor input: for the compressed KV entries and for the indexer keys.
fn raw_widths(spec: &Spec, compressed: &CompressedAttention, entries: CompressedKv) -> [u64; 2] {
    let head = u64::from(spec.attention.head_dim);
    match &compressed.indexer {
        Some(index) if entries.sparse => [2 * head, 2 * u64::from(index.width)],
        _ => [head, 0],
    }
}

/// Keys (which are the values too) and compressed KV entries of one layer. Every rank holds those
/// of all heads.
pub(super) fn pages(
    spec: &Spec,
    compressed: &CompressedAttention,
    layer: usize,
    load: &EngineLoad,
) -> u64 {
    let head = u64::from(spec.attention.head_dim);
    let keys = load.tokens * load.kv.head_bytes(head);
    let Some(entries) = spec.layers[layer].compressed_kv else { return keys };
    let ratio = u64::from(entries.compression_ratio);
    let [_, raw] = raw_widths(spec, compressed, entries);
    let index = raw / 2;
    let each = load.kv.head_bytes(head) + if index > 0 { load.kv.indexer_bytes(index) } else { 0 };
    // With an indexer (CSA), an entry also covers tokens of the page before its own, so each page
    // keeps the compressor input of its last tokens.
    let tail = if entries.sparse { ratio * (head + index) * 2 * F32_BYTES } else { 0 };
    keys + load.tokens / ratio * each + load.tokens / PAGE_TOKENS * tail
}

/// State of a sequence in a layer: the compressor input of tokens whose entry is not complete.
pub(super) fn state(spec: &Spec, compressed: &CompressedAttention, layer: usize) -> u64 {
    let Some(entries) = spec.layers[layer].compressed_kv else { return 0 };
    let held = u64::from(entries.compression_ratio) * if entries.sparse { 2 } else { 1 };
    let raw: u64 = raw_widths(spec, compressed, entries).iter().sum();
    (held + SPARE_ROWS) * 2 * raw * F32_BYTES
}

/// Floats for each row of a step.
pub(super) fn working(
    spec: &Spec,
    compressed: &CompressedAttention,
    part: &RankExtents,
    layer: usize,
) -> u64 {
    let [hidden, head] = [spec.hidden_size, spec.attention.head_dim].map(u64::from);
    let per_group = u64::from(spec.attention.heads / compressed.groups.max(1)) * head;
    let groups = part.query / per_group.max(1);
    let entries = spec.layers[layer].compressed_kv.map_or(0, |entries| {
        let raw: u64 = raw_widths(spec, compressed, entries).iter().sum();
        let index = compressed.indexer.as_ref().filter(|_| entries.sparse).map_or(0, |index| {
            let [heads, width] = [index.heads, index.width].map(u64::from);
            // Short queries, and one part of them brought together.
            2 * heads * width + width + heads + u64::from(index.top_k)
        });
        2 * raw + index
    });
    // Queries as projected and as normalised, what heads give, and what groups of them read.
    entries
        + 3 * hidden
        + 2 * u64::from(compressed.q_rank)
        + 4 * part.query
        + 3 * head
        + groups * u64::from(compressed.group_rank)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use shardpack_formats::memory::KvType;

    use crate::{
        plan::{ConvertOptions, Plan, RankMemory, memory::EngineLoad},
        source::Source,
    };

    /// Of the reference model by hand: a layer with only a window, two with a compression ratio of
    /// 4 and indexer keys of 16, two with a ratio of 8; heads of 32.
    #[test]
    fn caches_are_keys_entries_and_compressor_state() {
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/models/deepseek_v4");
        let source = Source::open(Path::new(model)).unwrap();
        let plan = Plan::new(&source, ConvertOptions::new("unused".into(), 3)).unwrap();
        let found = |tokens, sequences, kv| {
            let load = EngineLoad { tokens, sequences, step_tokens: 64, kv };
            RankMemory::of(&plan.normalised.spec, &plan.layout, (1, 0), &load).cache_bytes
        };
        // For each token; for each entry; for each page's last tokens; for each sequence.
        let chosen = 128 * (128 + 64) + 2 * 4 * (32 + 16) * 8 + 2 * (8 + 8) * 2 * 96 * 4;
        let all = 64 * 128 + 2 * (8 + 8) * 2 * 32 * 4;
        assert_eq!(found(512, 2, KvType::F32), 5 * 512 * 128 + 2 * chosen + 2 * all);
        let chosen = 128 * (36 + 32) + 2 * 4 * (32 + 16) * 8 + 2 * (8 + 8) * 2 * 96 * 4;
        let all = 64 * 36 + 2 * (8 + 8) * 2 * 32 * 4;
        assert_eq!(found(512, 2, KvType::Q8), 5 * 512 * 36 + 2 * chosen + 2 * all);
    }
}
