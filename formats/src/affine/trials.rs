//! What the search tries, for each width of integers and size of group.

use super::AffineFormat;

/// Trial grids and what is done with them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Schedule {
    /// Width relative to the group's range, then shift in steps from the middle of the range.
    pub(super) trials: &'static [(f32, f32)],
    /// Least-squares steps from the best fit of a trial; 0 fits nothing.
    pub(super) polish: u32,
}

impl Schedule {
    pub(super) const fn of(format: AffineFormat) -> Self {
        match format.bits() {
            2..=5 => Self { trials: &[(0.96, 0.0), (0.96, 0.25), (0.96, -0.25)], polish: 2 },
            6 => Self {
                trials: &[(0.9975, 0.0), (1.01, -0.5), (0.9975, 0.25), (0.9975, -0.25), (1.035, -1.0), (1.0225, -0.25)],
                polish: 1,
            },
            _ => Self {
                trials: &[(1.009, 1.0), (1.003, -0.5), (1.015, 0.0), (1.003, 0.25), (1.021, -0.5), (1.009, -1.0), (1.027, 0.5), (1.015, -1.0)],
                polish: 0,
            },
        }
    }
}
