//! Jobs on several threads.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

fn team(threads: usize) -> Team {
    let platform = Platform::detect();
    Team::new(&TeamOptions { threads, platform, activations: Activations::F32 }).unwrap()
}

#[test]
fn every_task_is_done_once_on_any_number_of_threads() {
    for threads in [1, 2, 3, 8] {
        let team = team(threads);
        for tasks in [0, 1, 2, 7, 100] {
            for _ in 0..20 {
                let done: Vec<_> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                team.each(tasks, &|task| {
                    done[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(done.iter().all(|done| done.load(Ordering::Relaxed) == 1));
            }
        }
    }
}

#[test]
fn sleeping_threads_are_not_needed_and_wake() {
    let team = team(4);
    for _ in 0..3 {
        // Longer than they spin, so that all sleep.
        let begun = Instant::now();
        while begun.elapsed() < 3 * SPIN {
            thread::yield_now();
        }
        let done = AtomicUsize::new(0);
        team.each(64, &|_| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.into_inner(), 64);
    }
}

#[test]
fn a_job_within_a_job_is_done_by_its_caller() {
    let team = team(2);
    let done = AtomicUsize::new(0);
    team.each(4, &|_| {
        team.each(3, &|_| {
            done.fetch_add(1, Ordering::Relaxed);
        });
    });
    assert_eq!(done.into_inner(), 12);
}

#[test]
fn a_panic_reaches_the_caller_and_the_team_goes_on() {
    let team = team(2);
    let failing = std::panic::AssertUnwindSafe(|| team.each(8, &|task| assert!(task != 5)));
    assert!(std::panic::catch_unwind(failing).is_err());
    let done = AtomicUsize::new(0);
    team.each(8, &|_| {
        done.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!(done.into_inner(), 8);
}

#[test]
fn parts_cover_the_whole_without_overlap() {
    let team = team(3);
    team.run(|| {
        let mut data = vec![0_u32; 1000];
        chunks(&current(), &mut data, 7, |index, chunk| {
            for (offset, element) in chunk.iter_mut().enumerate() {
                *element += (index * 7 + offset) as u32 + 1;
            }
        });
        assert!(data.iter().enumerate().all(|(index, element)| *element as usize == index + 1));
        let mut matrix = vec![0.0; 5 * 101];
        columns_of_all(&current(), &mut [&mut matrix], &[[101, 8]], |_, mut columns| {
            for row in 0..columns.rows() {
                let first = columns.range().start;
                for (offset, element) in columns.row(row).iter_mut().enumerate() {
                    *element += (row * 101 + first + offset) as f32 + 1.0;
                }
            }
        });
        assert!(matrix.iter().enumerate().all(|(index, element)| *element == index as f32 + 1.0));
        let ranges = [0..1, 1..40, 40..101];
        parts(&current(), &mut matrix, 101, (2, &ranges), |first_row, mut part| {
            for row in 0..part.rows() {
                let first = (first_row + row) * 101 + part.range().start;
                for (offset, element) in part.row(row).iter_mut().enumerate() {
                    *element -= (first + offset) as f32 + 1.0;
                }
            }
        });
        assert!(matrix.iter().all(|element| *element == 0.0));
    });
}

#[test]
fn a_team_is_current_only_within_its_run() {
    assert_eq!(current().threads, 1);
    team(2).run(|| assert_eq!(current().threads, 2));
    assert_eq!(current().threads, 1);
}
