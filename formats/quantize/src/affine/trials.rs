//! What the search tries, for each width of integers and size of group.
//!
//! The lists are what `tests/tune.rs` chose greedily on seeded bf16 weights, as far as another
//! trial was worth its time. They are part of what `refined` means: a change of one changes bytes.

use super::AffineFormat;

/// Trial grids and what is done with them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Schedule<'a> {
    /// Width relative to the group's range, then shift in steps from the middle of the range.
    pub(super) trials: &'a [(f32, f32)],
    /// Least-squares steps from the best fit of a trial; 0 fits nothing.
    pub(super) polish: u32,
}

impl Schedule<'static> {
    pub(super) const fn of(format: AffineFormat) -> Self {
        // With 8 bits the scale's own rounding moves the far end by nearly a step, so that a fit
        // is worth less than another trial.
        let (trials, polish) = match format.bits() {
            2 => (&TRIALS_2, 2),
            3 => (&TRIALS_3, 2),
            4 => (&TRIALS_4, 2),
            5 => (&TRIALS_5, 2),
            6 => (&TRIALS_6, 1),
            _ => (&TRIALS_8, 0),
        };
        let trials = match format.group_size() {
            32 => trials[0],
            64 => trials[1],
            _ => trials[2],
        };
        Self { trials, polish }
    }
}

/// Trials for groups of 32, 64 and 128.
type Trials = [&'static [(f32, f32)]; 3];

const TRIALS_2: Trials = [
    &[(0.75, 0.0), (0.75, -0.25), (0.75, 0.25)],
    &[(0.7, 0.0), (0.65, -0.25), (0.65, 0.25)],
    &[(0.65, 0.0), (0.6, -0.25), (0.55, 0.5)],
];

const TRIALS_3: Trials = [
    &[(0.91, 0.0), (0.94, 0.25), (0.94, -0.25)],
    &[(0.85, 0.0), (0.88, -0.25), (0.88, 0.25)],
    &[(0.79, 0.0), (0.79, -0.25), (0.79, 0.25)],
];

const TRIALS_4: Trials = [
    &[(0.98, 0.0), (0.98, 0.25), (0.98, -0.25)],
    &[(0.96, 0.0), (0.96, 0.25), (0.96, -0.25)],
    &[(0.92, 0.0), (0.92, -0.25), (0.92, 0.25)],
];

const TRIALS_5: Trials = [
    &[(0.99, 0.0), (1.02, 0.5), (0.99, -0.25), (0.99, 0.25)],
    &[(0.99, 0.0), (0.99, 0.25), (0.99, -0.25), (1.02, -0.5)],
    &[(0.975, 0.0), (0.975, 0.25), (0.975, -0.25), (0.975, -0.5)],
];

const TRIALS_6: Trials = [
    &[(0.9975, 0.0), (1.01, -0.5), (1.035, 1.0), (1.0475, 0.5), (0.9975, -0.25), (0.9975, 0.25)],
    &[(0.9975, 0.0), (1.01, -0.5), (0.9975, 0.25), (0.9975, -0.25), (1.035, -1.0), (1.0475, 0.5)],
    &[(0.9975, 0.0), (1.01, -0.5), (0.9975, 0.25), (0.9975, -0.25), (0.9975, 0.5), (0.985, 0.0)],
];

const TRIALS_8: Trials = [
    &[
        (1.009, 1.0),
        (1.015, -1.0),
        (1.003, -0.25),
        (1.003, 0.25),
        (1.021, 0.5),
        (1.027, -0.5),
        (1.015, 0.0),
        (1.033, -1.0),
    ],
    &[
        (1.009, 1.0),
        (1.003, -0.5),
        (1.015, 0.0),
        (1.003, 0.25),
        (1.021, 0.5),
        (1.009, -0.25),
        (1.015, -1.0),
        (1.021, -0.5),
    ],
    &[
        (1.003, -0.5),
        (1.009, 1.0),
        (1.003, 0.25),
        (1.015, 0.0),
        (0.997, 0.0),
        (1.009, -0.5),
        (1.021, 0.5),
        (1.015, -1.0),
    ],
];
