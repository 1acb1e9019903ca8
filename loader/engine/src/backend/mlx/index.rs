//! Attention to chosen keys within the graph.

use std::ops::Range;

use shardpack_mlx::{Array, Binary, Element, Library, Reduce, Unary};

use super::{Cache, Tensor, attention::fused, cache::Held};
use crate::backend::{AttentionStep, IndexInputs, IndexStep};

/// Products of short queries and keys that are held at the same time; rows beyond follow one after
/// the other.
const MAX_PRODUCTS: usize = 64 << 20;

/// What the rows of each sequence attend to; none where they attend to all.
#[derive(Debug)]
pub struct Chosen(pub(super) Vec<Option<Choice>>);

/// Of one sequence.
#[derive(Debug)]
pub(super) enum Choice {
    /// Positions of keys, `[rows, top_k]`.
    Keys(Array),
    /// Blocks of so many keys for each key-value head, `[rows, heads, top_k]`; a row with fewer has
    /// some that it does not see.
    Blocks(usize, Array),
}

/// Appends keys to the caches and chooses among them. Equal scores are decided as MLX sorts them.
pub(super) fn choose(
    library: Library,
    inputs: &IndexInputs<'_, Tensor>,
    caches: &mut [&mut Cache],
    step: &IndexStep<'_>,
) -> Chosen {
    assert_eq!(caches.len(), step.lengths.len(), "one cache per sequence");
    let mut chosen = Vec::with_capacity(caches.len());
    let mut row = 0;
    for (cache, &rows) in caches.iter_mut().zip(step.lengths) {
        let begin = row;
        row += rows;
        let part = |x: &Tensor| x.array.slice(0, begin, begin + rows);
        let new = part(inputs.k).reshape(&[1, 1, rows, step.width]);
        let (keys, first) = cache.append_index(step.layer, new);
        let total = first + rows;
        if total <= step.top_k {
            chosen.push(None);
            continue;
        }
        let (q, weights) = (part(inputs.q), part(inputs.weights));
        let keys = keys.reshape(&[total, step.width]).transpose(&[1, 0]);
        let all = some_at_once(library, (rows, step.heads * total), |some| {
            let [q, weights] = [&q, &weights].map(|x| x.slice(0, some.start, some.end));
            best(library, [&q, &weights, &keys], first + some.start, step)
        });
        chosen.push(Some(Choice::Keys(all)));
    }
    Chosen(chosen)
}

/// What `work` gives for all rows, as many at a time as may hold so many products each.
pub(super) fn some_at_once(
    library: Library,
    (rows, products): (usize, usize),
    work: impl Fn(Range<usize>) -> Array,
) -> Array {
    let at_once = (MAX_PRODUCTS / products).max(1);
    let parts = (0..rows).step_by(at_once).map(|from| work(from..rows.min(from + at_once)));
    library.concat(&parts.collect::<Vec<_>>().iter().collect::<Vec<_>>(), 0)
}

/// The keys of the largest scores for some rows, of which the first stands at `first`. A row with
/// fewer keys than are chosen has some that it does not see.
fn best(
    library: Library,
    [q, weights, keys]: [&Array; 3],
    first: usize,
    step: &IndexStep<'_>,
) -> Array {
    let (rows, total) = (q.shape()[0], keys.shape()[1]);
    let scores = scores([q, weights, keys], step);
    let hidden = library.full(f32::NEG_INFINITY, Element::F32, &[]);
    let scores = seen(library, first, rows, total).choose(&scores, &hidden);
    let order = scores.unary(Unary::Negative).argsort(-1);
    order.slice(1, 0, step.top_k).cast(Element::U32)
}

/// Scores `[rows, total]` of keys `[width, total]`.
pub(super) fn scores([q, weights, keys]: [&Array; 3], step: &IndexStep<'_>) -> Array {
    let (rows, total) = (q.shape()[0], keys.shape()[1]);
    let products = q.reshape(&[rows * step.heads, step.width]).matmul(keys);
    let products = products.with_constant(Binary::Maximum, 0.0);
    let products = products.reshape(&[rows, step.heads, total]);
    let weights = weights.reshape(&[rows, step.heads, 1]);
    let scores = products.binary(Binary::Multiply, &weights).reduce(Reduce::Sum, 1);
    scores.reshape(&[rows, total])
}

/// Whether each row sees each key, `[rows, total]`.
pub(super) fn seen(library: Library, first: usize, rows: usize, total: usize) -> Array {
    let numbers = |count: usize, from: usize| -> Vec<f32> {
        (from..from + count).map(|number| number as f32).collect()
    };
    // Positions are whole numbers below 2^24, which floats hold.
    let keys = library.floats(&numbers(total, 0), &[1, total]);
    let rows = library.floats(&numbers(rows, first), &[rows, 1]);
    rows.binary(Binary::GreaterEqual, &keys)
}

/// Attention of queries `[1, heads, rows, head_dim]` to the `chosen` of all keys.
pub(super) fn to_some(
    q: &Array,
    held: &Held,
    first: usize,
    chosen: &Array,
    step: &AttentionStep<'_, Array>,
) -> Array {
    let library = q.library();
    let (rows, total, count) = (q.shape()[2], held.keys.shape()[2], chosen.shape()[1]);
    if rows == 1 {
        let chosen = chosen.reshape(&[count]);
        return fused(q, &held.map(|all| all.take(&chosen, 2)), None, step);
    }
    let zeros = library.full(0.0, Element::F32, &[rows, total]);
    let ones = library.full(1.0, Element::F32, &[rows, count]);
    let taken = zeros.put_along(chosen, &ones, 1).with_constant(Binary::GreaterEqual, 0.5);
    let visible = taken.binary(Binary::And, &seen(library, first, rows, total));
    fused(q, held, Some(&visible), step)
}
