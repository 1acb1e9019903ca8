//! Queries of some rows, times the score scale, in the layout that the keys need.

#![expect(clippy::inline_always, reason = "compiled within the function of each platform")]

use zerocopy::{FromBytes, IntoBytes};

use super::{
    KvBlock, Order,
    integers::{limit, rounded},
    keys::Line,
    vectors::Vectors,
};
use crate::lanes::LANES;

/// Integers as pairs of 16 bits.
#[inline(always)]
pub(super) fn shorts(elements: &mut [i32]) -> &mut [i16] {
    <[i16]>::mut_from_bytes(elements.as_mut_bytes()).expect("half as long")
}

/// Queries of one row.
#[derive(Clone, Copy)]
pub(super) enum Queries<'a> {
    /// For keys in [`Order::Rows`]: `[heads, width]`.
    Rows(&'a [Line]),
    /// For keys in [`Order::Lanes`].
    Lanes(InLanes<'a>),
}

/// Queries `[heads, width]` for keys in [`Order::Lanes`].
#[derive(Clone, Copy)]
pub(super) enum InLanes<'a> {
    Floats(&'a [f32]),
    /// For integers: rounded to 16 bits, two in a number, and what one is worth for each head.
    Integers {
        factors: &'a [i32],
        worth: &'a [f32],
    },
}

/// The queries of a row.
#[derive(Clone, Copy)]
pub(super) struct QueryShape {
    pub(super) heads: usize,
    /// Elements of a head.
    pub(super) width: usize,
    /// Factor on scores.
    pub(super) scale: f32,
}

/// Room for the queries of several rows.
#[derive(Default)]
pub(super) struct QueryBuffer {
    heads: usize,
    width: usize,
    lines: Vec<Line>,
    floats: Vec<f32>,
    integers: Vec<i32>,
    worth: Vec<f32>,
}

impl QueryBuffer {
    /// Takes rows of `heads` queries of `width`.
    #[inline(always)]
    pub(super) fn fill<'a, V: Vectors>(
        &mut self,
        rows: impl Iterator<Item = &'a [f32]>,
        QueryShape { heads, width, scale }: QueryShape,
        (order, keys): (Order, KvBlock<'_>),
    ) {
        let Self { lines, floats, integers, worth, .. } = self;
        lines.clear();
        floats.clear();
        integers.clear();
        worth.clear();
        (self.heads, self.width) = (heads, width);
        for row in rows {
            match order {
                Order::Rows => Line::append(row, width, scale, lines),
                Order::Lanes => floats.extend(row.iter().map(|value| value * scale)),
            }
        }
        if matches!(keys, KvBlock::Q8 { .. }) {
            integers.resize(floats.len() / 2, 0);
            for (q, to) in floats.chunks_exact(width).zip(integers.chunks_exact_mut(width / 2)) {
                let to = shorts(to).as_chunks_mut().0;
                worth.push(rounded::<V>(q.as_chunks::<LANES>().0.iter(), limit(width), to));
            }
        }
    }

    /// The queries of one of the rows.
    #[inline(always)]
    pub(super) fn row(&self, row: usize, order: Order) -> Queries<'_> {
        let Self { heads, width, lines, floats, integers, worth } = self;
        let (first, len) = (row * heads * width, heads * width);
        match order {
            Order::Rows => {
                let len = heads * width.div_ceil(LANES);
                Queries::Rows(&lines[row * len..][..len])
            }
            Order::Lanes if worth.is_empty() => {
                Queries::Lanes(InLanes::Floats(&floats[first..][..len]))
            }
            Order::Lanes => Queries::Lanes(InLanes::Integers {
                factors: &integers[first / 2..][..len / 2],
                worth: &worth[row * heads..][..*heads],
            }),
        }
    }
}
