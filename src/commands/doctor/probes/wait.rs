//! How long the GPU may wait for other ranks within one evaluation: macOS ends GPU work that does
//! not finish in time, and a rank's wait for a slower one is a part of it.

use std::{
    thread,
    time::{Duration, Instant},
};

use serde_json::json;
use shardpack_mlx::{Collective, Element, Library};

use super::{Note, Outcome, is_gpu};
use crate::commands::doctor::report::Finding;

/// Waits in seconds: what every rank must be able to wait, and what ends most GPUs' work.
const WAITS: [f64; 2] = [2.0, 8.0];

/// Sums of one rank that take their time.
struct Late(Duration);

impl Collective for Late {
    fn sum(&mut self, _: &mut [f32]) -> bool {
        thread::sleep(self.0);
        true
    }

    fn gather(&mut self, _: &[f32], _: &mut [f32]) -> bool {
        false
    }
}

pub(super) fn run(library: Library, note: Note<'_>) {
    // Only the first is meant to succeed everywhere; the second may leave the GPU refusing work.
    let waits = if is_gpu(library) { &WAITS[..] } else { &WAITS[..1] };
    for (index, seconds) in waits.iter().enumerate() {
        let name = format!("how long the GPU may wait, {seconds} s");
        note(&name, Ok(wait(library, *seconds, index == 0)));
    }
}

fn wait(library: Library, seconds: f64, must_pass: bool) -> Outcome {
    let mut late = Late(Duration::from_secs_f64(seconds));
    let begun = Instant::now();
    let read = library.with_collective(&mut late, || {
        let x = library.full(1.0, Element::F32, &[1024]);
        let x = x.binary(shardpack_mlx::Binary::Add, &x).summed_over_ranks(None);
        x.binary(shardpack_mlx::Binary::Add, &x).read()
    });
    let took = begun.elapsed().as_secs_f64();
    let error = match read {
        Ok(values) if values.iter().all(|value| value.to_bits() == 4.0_f32.to_bits()) => None,
        Ok(_) => Some("the result is wrong".to_owned()),
        Err(error) => Some(error.to_string()),
    };
    let figures = json!({ "waited_seconds": seconds, "took_seconds": took, "error": error });
    match error {
        None => {
            let detail = format!("an evaluation that waited {seconds} s was right");
            Outcome::Found(Finding::new(detail, figures))
        }
        Some(error) if must_pass => Outcome::Failed(
            format!("after {took:.1} s: {error}"),
            "a slow rank will end this one: give every rank the same load, and report this".into(),
        ),
        Some(error) => {
            let detail = format!("macOS ended the GPU's work after {took:.1} s: {error}");
            let expected = "ranks wait for one another less long than this, and else start again";
            Outcome::Found(Finding::new(detail, figures).expected(expected))
        }
    }
}
