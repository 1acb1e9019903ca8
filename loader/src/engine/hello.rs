//! What ranks tell each other before their first step: whether they compute alike, and how much
//! memory each has for keys and values.
//!
//! | bytes | field |
//! |---|---|
//! | 4 | version of the steps |
//! | 4 | tokens of the vocabulary |
//! | 1 | how keys and values are stored |
//! | 8 | pages of keys and values that there is memory for |

use shardpack_collectives::{Deadline, Group, GroupError};

use crate::backend::KvType;

/// Version of plans and of what ranks gather in a step.
const VERSION: u32 = 2;

/// One rank's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) vocab_size: u32,
    pub(super) kv: KvType,
    pub(super) pages: u64,
}

impl Hello {
    fn encode(self) -> Vec<u8> {
        let kv = match self.kv {
            KvType::F32 => 0,
            KvType::F16 => 1,
            KvType::Bf16 => 2,
            KvType::Q8 => 3,
        };
        let mut bytes = VERSION.to_le_bytes().to_vec();
        bytes.extend(self.vocab_size.to_le_bytes());
        bytes.push(kv);
        bytes.extend(self.pages.to_le_bytes());
        bytes
    }

    /// Hears all ranks and returns the pages that every one of them has memory for.
    pub(super) fn exchange(self, group: &dyn Group, deadline: Deadline) -> Result<u64, GroupError> {
        let mine = self.encode();
        let (agreed, pages) = mine.split_at(mine.len() - size_of::<u64>());
        let mut least = self.pages;
        for (rank, bytes) in group.all_gather(&mine, deadline)?.iter().enumerate() {
            let theirs = bytes.split_at_checked(agreed.len()).filter(|(it, _)| *it == agreed);
            let count = theirs.and_then(|(_, pages)| pages.try_into().ok());
            let Some(count) = count.map(u64::from_le_bytes) else {
                return Err(GroupError::OutOfStep {
                    rank: rank as u32,
                    expected: format!(
                        "an engine that stores keys and values as {:?} (--kv-type), and {} bytes",
                        self.kv,
                        agreed.len() + pages.len()
                    ),
                    found: format!("{bytes:?}"),
                });
            };
            least = least.min(count);
        }
        Ok(least)
    }
}
