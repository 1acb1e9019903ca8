//! A group of ranks that are threads of one process: every call is an exchange of bytes.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use shardpack_collectives::{Deadline, Group, GroupError};

/// One rank's end.
pub(crate) struct ThreadGroup {
    rank: u32,
    epoch: u64,
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// What each rank has brought to the current call.
    brought: Vec<Option<Vec<u8>>>,
    /// The result of the call, while ranks take it.
    result: Option<Vec<Vec<u8>>>,
    /// Ranks that have not taken the result yet.
    takers: usize,
    aborted: Option<String>,
}

/// The ends of a group of `size` ranks.
pub(crate) fn thread_groups(size: u32, epoch: u64) -> Vec<Arc<dyn Group>> {
    let state =
        State { brought: vec![None; size as usize], result: None, takers: 0, aborted: None };
    let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
    (0..size)
        .map(|rank| {
            Arc::new(ThreadGroup { rank, epoch, shared: Arc::clone(&shared) }) as Arc<dyn Group>
        })
        .collect()
}

impl ThreadGroup {
    /// Every rank's bytes, once all have come.
    fn exchange(&self, mine: Vec<u8>, deadline: Deadline) -> Result<Vec<Vec<u8>>, GroupError> {
        let waited = deadline.left();
        let rank = self.rank as usize;
        let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut mine = Some(mine);
        loop {
            // What is complete is delivered even if the group ends meanwhile.
            if mine.is_none()
                && let Some(result) = state.result.clone()
            {
                state.takers -= 1;
                if state.takers == 0 {
                    state.result = None;
                    self.shared.changed.notify_all();
                }
                return Ok(result);
            }
            if let Some(reason) = &state.aborted {
                return Err(GroupError::Aborted(reason.clone()));
            }
            if let Some(bytes) = mine.take_if(|_| state.result.is_none()) {
                state.brought[rank] = Some(bytes);
                if state.brought.iter().all(Option::is_some) {
                    state.result =
                        Some(state.brought.iter_mut().filter_map(Option::take).collect());
                    state.takers = state.brought.len();
                    self.shared.changed.notify_all();
                    continue;
                }
            }
            if deadline.left().is_zero() {
                let late = state.brought.iter().position(Option::is_none).unwrap_or(0);
                return Err(GroupError::Timeout { rank: late as u32, waited });
            }
            let wait = self.shared.changed.wait_timeout(state, deadline.left());
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Group for ThreadGroup {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.shared.state.lock().unwrap().brought.len() as u32
    }

    fn epoch(&self) -> u64 {
        self.epoch
    }

    fn all_reduce_sum(&self, values: &mut [f32], deadline: Deadline) -> Result<(), GroupError> {
        let mine = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let parts = self.exchange(mine, deadline)?;
        for (index, value) in values.iter_mut().enumerate() {
            let part = |bytes: &Vec<u8>| f32::from_le_bytes(bytes.as_chunks::<4>().0[index]);
            *value = parts.iter().map(part).reduce(|sum, part| sum + part).expect("a rank");
        }
        Ok(())
    }

    fn all_gather(&self, mine: &[u8], deadline: Deadline) -> Result<Vec<Vec<u8>>, GroupError> {
        self.exchange(mine.to_vec(), deadline)
    }

    fn broadcast(
        &self,
        root: u32,
        bytes: &mut Vec<u8>,
        deadline: Deadline,
    ) -> Result<(), GroupError> {
        let mine = if self.rank == root { bytes.clone() } else { Vec::new() };
        *bytes = self.exchange(mine, deadline)?.swap_remove(root as usize);
        Ok(())
    }

    fn barrier(&self, deadline: Deadline) -> Result<(), GroupError> {
        self.exchange(Vec::new(), deadline).map(drop)
    }

    fn abort(&self, reason: &str) {
        let mut state = self.shared.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.aborted.get_or_insert_with(|| reason.to_owned());
        self.shared.changed.notify_all();
    }
}
