//! Compressed KV entries within the graph: how many are complete follows from positions alone, so
//! nothing is read before the step's end.

use shardpack_formats::memory::TOKENS_PER_PAGE;
use shardpack_mlx::{Array, Binary, Element, Library, Reduce};

use super::{Cache, Mlx, Tensor, TopK, Vector, cache::Held, joined, sparse_indexer::scores};
use crate::backend::{
    AttentionParams, CompressedEntries, CompressedKv, CompressedKvPart, CompressedKvShape,
    CompressorInputs, CompressorParams, IndexerInputs, IndexerParams, Qkv,
};

impl CompressedKv for Mlx {
    fn compress(
        &self,
        inputs: CompressorInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &CompressorParams<'_, Vector>,
    ) -> Tensor {
        compress(self.library, inputs, caches, params)
    }

    fn top_k_entries(
        &self,
        inputs: IndexerInputs<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &IndexerParams<'_>,
    ) -> TopK {
        top_k_entries(self.library, &inputs, caches, params)
    }

    fn compressed_attention(
        &self,
        entries: CompressedEntries<'_, Tensor, TopK>,
        qkv: Qkv<'_, Tensor>,
        caches: &mut [&mut Cache],
        params: &AttentionParams<'_, Vector>,
    ) -> Tensor {
        attend(self.library, &entries, &qkv, caches, params)
    }
}

/// What a sequence keeps in one layer with entries.
#[derive(Clone)]
pub(super) struct Entries {
    library: Library,
    pub(super) shape: CompressedKvShape,
    /// Of entries and of the keys of their indexer.
    parts: [Kept; 2],
}

#[derive(Clone, Default)]
struct Kept {
    /// Tokens whose projections have come.
    len: usize,
    /// The first whose projections are held.
    first: usize,
    /// Projections `c` and `z` of the tokens from `first`, `[tokens, columns]`; none without tokens.
    held: Option<[Array; 2]>,
    /// For each full page projections of its last tokens, if entries overlap.
    tails: Vec<[Array; 2]>,
    /// `[entries, width]`, none without entries.
    entries: Option<Array>,
}

/// Entries of one layer in a page: of each part its own and the projections of its last tokens.
#[derive(Clone)]
pub(super) struct CompressedKvPage {
    parts: [PagePart; 2],
}

/// One part of a layer's entries in a page.
#[derive(Clone)]
struct PagePart {
    entries: Option<Array>,
    /// Projections of the page's last tokens, if entries overlap.
    tail: Option<[Array; 2]>,
}

impl CompressedKvPage {
    /// Every array, for evaluation.
    pub(super) fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.parts.iter().flat_map(|part| part.entries.iter().chain(part.tail.iter().flatten()))
    }
}

const PARTS: [CompressedKvPart; 2] = [CompressedKvPart::Entries, CompressedKvPart::Keys];

/// Bytes of a layer's entries in a page.
pub(super) fn page_bytes(shape: CompressedKvShape) -> u64 {
    let part = |part| {
        let tail = if shape.overlaps() { shape.ratio * 2 * shape.columns(part) } else { 0 };
        TOKENS_PER_PAGE / shape.ratio * shape.width(part) + tail
    };
    (PARTS.map(part).iter().sum::<usize>() * 4) as u64
}

impl Entries {
    /// Of a sequence that begins with pages of this layer.
    pub(super) fn begun(
        library: Library,
        shape: CompressedKvShape,
        pages: &[&CompressedKvPage],
    ) -> Self {
        let part = |part: CompressedKvPart| {
            let parts = || pages.iter().map(|page| &page.parts[part as usize]);
            let entries: Vec<Array> = parts().filter_map(|it| it.entries.clone()).collect();
            let tails: Vec<[Array; 2]> = parts().filter_map(|it| it.tail.clone()).collect();
            let len = pages.len() * TOKENS_PER_PAGE;
            let held = tails.last().cloned();
            let first = len - if held.is_some() { shape.ratio } else { 0 };
            let all = entries.iter().collect::<Vec<_>>();
            let entries = (!all.is_empty()).then(|| library.concat(&all, 0));
            Kept { len, first, held, tails, entries }
        };
        Self { library, shape, parts: PARTS.map(part) }
    }

    pub(super) fn page(&self, index: usize) -> CompressedKvPage {
        let each = TOKENS_PER_PAGE / self.shape.ratio;
        let part = |part: CompressedKvPart| {
            let kept = &self.parts[part as usize];
            let entries = kept.entries.as_ref();
            let entries =
                entries.map(|all| all.slice(0, index * each, (index + 1) * each).contiguous());
            let tail = kept.tails.get(index);
            let tail = tail.map(|tail| tail.each_ref().map(Array::contiguous));
            PagePart { entries, tail }
        };
        CompressedKvPage { parts: PARTS.map(part) }
    }

    pub(super) fn len(&self) -> usize {
        self.parts[CompressedKvPart::Entries as usize].len
    }

    pub(super) fn arrays(&self) -> impl Iterator<Item = &Array> {
        self.parts.iter().flat_map(|kept| {
            let projections = kept.held.iter().chain(&kept.tails).flatten();
            kept.entries.iter().chain(projections)
        })
    }

    /// Takes the projections of rows and returns the entries that they complete, if any,
    /// `[entries, width]`.
    fn compress(&mut self, part: CompressedKvPart, new: [Array; 2], bias: &Array) -> Option<Array> {
        let (library, shape) = (self.library, self.shape);
        let (ratio, columns) = (shape.ratio, shape.columns(part));
        let kept = &mut self.parts[part as usize];
        let (before, rows) = (kept.len / ratio, new[0].shape()[0]);
        let held = match kept.held.take() {
            None => new,
            Some([c, z]) => [library.concat(&[&c, &new[0]], 0), library.concat(&[&z, &new[1]], 0)],
        };
        let first = kept.first;
        let some = |from: usize, until: usize| {
            held.each_ref().map(|all| all.slice(0, from - first, until - first))
        };
        let pages = kept.len / TOKENS_PER_PAGE;
        kept.len += rows;
        if shape.overlaps() {
            for page in pages + 1..=kept.len / TOKENS_PER_PAGE {
                let end = page * TOKENS_PER_PAGE;
                kept.tails.push(some(end - ratio, end));
            }
        }
        let after = kept.len / ratio;
        let entries = (after > before).then(|| {
            let own = some(before * ratio, after * ratio);
            let earlier = shape.overlaps().then(|| {
                // The first entry of all has no tokens before its own.
                let from = before.saturating_sub(1) * ratio;
                let some = some(from, (after - 1) * ratio);
                if before > 0 {
                    return some;
                }
                let nothing = |value| library.full(value, Element::F32, &[ratio, columns]);
                let [c, z] = &some;
                if after == 1 {
                    return [nothing(0.0), nothing(f32::NEG_INFINITY)];
                }
                [(c, 0.0), (z, f32::NEG_INFINITY)]
                    .map(|(all, value)| library.concat(&[&nothing(value), all], 0))
            });
            pooled(shape, part, [Some(own), earlier], bias)
        });
        let overlap = if shape.overlaps() { ratio } else { 0 };
        let from = (after * ratio).saturating_sub(overlap).max(kept.first);
        kept.held = (from < kept.len).then(|| some(from, kept.len));
        kept.first = from;
        entries
    }

    /// Keeps entries of a part, and gives all of them.
    fn put(&mut self, part: CompressedKvPart, new: Option<Array>) -> Option<&Array> {
        let kept = &mut self.parts[part as usize];
        kept.entries = match (kept.entries.take(), new) {
            (Some(all), Some(new)) => Some(self.library.concat(&[&all, &new], 0)),
            (all, new) => all.or(new),
        };
        kept.entries.as_ref()
    }
}

/// Entries of their own tokens' projections and of the tokens before, `[entries · ratio, columns]` each.
fn pooled(
    shape: CompressedKvShape,
    part: CompressedKvPart,
    tokens: [Option<[Array; 2]>; 2],
    bias: &Array,
) -> Array {
    let (ratio, width, columns) = (shape.ratio, shape.width(part), shape.columns(part));
    let (library, bias) = (bias.library(), bias.reshape(&[ratio, columns]));
    // Own tokens count with their last columns, those before with their first.
    let [own, earlier] = tokens;
    let parts = [earlier.map(|tokens| (tokens, 0)), own.map(|tokens| (tokens, columns - width))];
    let (mut cs, mut zs) = (Vec::new(), Vec::new());
    let mut count = 0;
    for ([c, z], column) in parts.into_iter().flatten() {
        count = c.shape()[0] / ratio;
        let of = |x: &Array, rows: usize| {
            x.slice(1, column, column + width).reshape(&[rows, ratio, width])
        };
        cs.push(of(&c, count));
        zs.push(of(&z, count).binary(Binary::Add, &of(&bias, 1)));
    }
    let joined = |all: &[Array]| library.concat(&all.iter().collect::<Vec<_>>(), 1);
    let weights = joined(&zs).softmax(1);
    let sum = weights.binary(Binary::Multiply, &joined(&cs)).reduce(Reduce::Sum, 1);
    sum.reshape(&[count, width])
}

/// Takes projections of the step's rows, and returns the entries that are complete with them.
fn compress(
    library: Library,
    CompressorInputs { values: c, gates: z }: CompressorInputs<'_, Tensor>,
    caches: &mut [&mut Cache],
    params: &CompressorParams<'_, Vector>,
) -> Tensor {
    let (mut row, mut width) = (0, 1);
    let mut all = Vec::new();
    for (cache, &rows) in caches.iter_mut().zip(params.lengths) {
        let entries = &mut cache.entries[params.layer];
        width = entries.shape.width(params.part);
        let new = [c, z].map(|x| x.exact().slice(0, row, row + rows));
        all.extend(entries.compress(params.part, new, params.bias));
        row += rows;
    }
    let count = all.iter().map(|entries| entries.shape()[0]).sum();
    let array = match &all[..] {
        [] => library.full(0.0, Element::F32, &[0, width]),
        all => joined(all),
    };
    Tensor::new(count, width, array.cast(c.array.element()))
}

/// What a step has completed in one layer of a sequence.
struct Completed {
    /// Number of entries.
    count: usize,
    /// Position of the first row.
    first: usize,
}

impl Completed {
    /// By a step of so many rows.
    fn new(entries: &Entries, rows: usize) -> Self {
        let first = entries.len() - rows;
        let ratio = entries.shape.ratio;
        Self { count: entries.len() / ratio - first / ratio, first }
    }
}

/// Keeps the index keys of new entries and selects among those of all. Equal scores are decided as
/// MLX sorts them.
fn top_k_entries(
    library: Library,
    inputs: &IndexerInputs<'_, Tensor>,
    caches: &mut [&mut Cache],
    params: &IndexerParams<'_>,
) -> TopK {
    let mut top_k = Vec::with_capacity(caches.len());
    let (mut row, mut entry) = (0, 0);
    for (cache, &rows) in caches.iter_mut().zip(params.lengths) {
        let entries = &mut cache.entries[params.layer];
        let Completed { count: new, first } = Completed::new(entries, rows);
        let keys = (new > 0).then(|| inputs.k.exact().slice(0, entry, entry + new));
        let ratio = entries.shape.ratio;
        let all = entries.put(CompressedKvPart::Keys, keys);
        entry += new;
        let begin = row;
        row += rows;
        let (Some(keys), total) = (all, (first + rows) / ratio) else {
            top_k.push(None);
            continue;
        };
        if total <= params.top_k {
            top_k.push(None);
            continue;
        }
        let part = |x: &Tensor| x.exact().slice(0, begin, begin + rows);
        let (q, weights) = (part(inputs.q), part(inputs.weights));
        let scores = scores([&q, &weights, &keys.transpose(&[1, 0])], params);
        let hidden = library.full(f32::NEG_INFINITY, Element::F32, &[]);
        let scores =
            seen(library, first, rows, EntryCount { total, ratio }).choose(&scores, &hidden);
        let order = scores.unary(shardpack_mlx::Unary::Negative).argsort(-1);
        let best = order.slice(1, 0, params.top_k).cast(Element::U32);
        top_k.push(Some(best));
    }
    TopK(top_k)
}

/// Entries of a sequence, and the tokens of each.
#[derive(Clone, Copy)]
struct EntryCount {
    total: usize,
    ratio: usize,
}

/// Whether each row sees each entry, `[rows, total]`.
fn seen(library: Library, first: usize, rows: usize, entries: EntryCount) -> Array {
    let EntryCount { total, ratio } = entries;
    let sees = |row| (0..total).map(move |entry| u8::from(entry < (first + row + 1) / ratio));
    let bytes: Vec<u8> = (0..rows).flat_map(sees).collect();
    library.copy_in(&bytes, Element::Bool, &[rows, total])
}

/// Appends keys, which are values, to the caches, keeps new entries, and attends to the tokens of a
/// window and to entries: the top-k ones, or all that a row sees.
fn attend(
    library: Library,
    compressed: &CompressedEntries<'_, Tensor, TopK>,
    qkv: &Qkv<'_, Tensor>,
    caches: &mut [&mut Cache],
    params: &AttentionParams<'_, Vector>,
) -> Tensor {
    let CompressedEntries { layer, new: new_entries, window, .. } = *compressed;
    let mut outputs = Vec::new();
    let (mut row, mut entry) = (0, 0);
    for (index, (cache, &rows)) in caches.iter_mut().zip(params.lengths).enumerate() {
        let heads = |x: &Tensor| {
            let part = x.some_rows(row..row + rows);
            let heads = x.width / params.head_dim;
            part.reshape(&[1, rows, heads, params.head_dim]).transpose(&[0, 2, 1, 3])
        };
        let Completed { count: new, first } = Completed::new(&cache.entries[layer], rows);
        let new_ones = (new > 0).then(|| new_entries.exact().slice(0, entry, entry + new));
        entry += new;
        let ratio = cache.entries[layer].shape.ratio;
        let entries = cache.entries[layer].put(CompressedKvPart::Entries, new_ones).cloned();
        let Held { keys, .. } = cache.append(params.layer, &[heads(qkv.k), heads(qkv.v)]).all;
        let total = first + rows;
        let from = (first + 1).saturating_sub(window);
        let keys = keys.slice(2, from, total);
        let tokens = {
            let sees = |row: usize| {
                (from..total)
                    .map(move |key| u8::from(key <= first + row && first + row - key < window))
            };
            let bytes: Vec<u8> = (0..rows).flat_map(sees).collect();
            library.copy_in(&bytes, Element::Bool, &[rows, total - from])
        };
        let top_k = compressed.top_k.and_then(|top_k| top_k.0[index].as_ref());
        let (keys, visible) = match entries {
            None => (keys, tokens),
            Some(entries) => {
                let count = entries.shape()[0];
                let visible = seen(library, first, rows, EntryCount { total: count, ratio });
                let visible = match top_k {
                    None => visible,
                    Some(top_k) => {
                        let zeros = library.full(0.0, Element::F32, &[rows, count]);
                        let ones = library.full(1.0, Element::F32, &top_k.shape());
                        let taken = zeros.put_along(top_k, &ones, 1);
                        let taken = taken.with_constant(Binary::GreaterEqual, 0.5);
                        taken.binary(Binary::And, &visible)
                    }
                };
                let entries = entries.reshape(&[1, 1, count, params.head_dim]);
                (library.concat(&[&entries, &keys], 2), library.concat(&[&visible, &tokens], 1))
            }
        };
        // Entries are f32, and there is no kernel of this width.
        let q = heads(qkv.q).cast(Element::F32);
        let sinks = params.sinks.map(|sinks| &**sinks);
        let out = q.attention(&keys, &keys, params.scale, Some(&visible), sinks);
        outputs.push(out.transpose(&[0, 2, 1, 3]).reshape(&[rows, qkv.q.width]));
        row += rows;
    }
    qkv.q.with_exact(&joined(&outputs))
}
