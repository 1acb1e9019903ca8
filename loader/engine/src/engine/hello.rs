//! The handshake of the ranks before their first step: whether they compute alike, and how much KV
//! memory each has.
//!
//! | bytes | field |
//! |---|---|
//! | 4 | version of the steps |
//! | 4 | tokens of the vocabulary |
//! | 1 | KV cache type |
//! | 1 | whether its KV cache can be rolled back |
//! | 8 | KV pages that there is memory for |
//! | 4 | prefill tokens of a step that there is memory for |

use shardpack_collectives::{Deadline, Group, GroupError};
use shardpack_formats::memory::KvType;

/// Version of plans and of the candidates that ranks gather.
const VERSION: u32 = 5;

/// One rank's part of the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) vocab_size: u32,
    pub(super) kv: KvType,
    pub(super) can_roll_back: bool,
    pub(super) pages: u64,
    pub(super) prefill_tokens: u32,
}

/// What every rank supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Agreed {
    /// Whether every rank's KV cache can be rolled back.
    pub(super) can_roll_back: bool,
    /// Pages that every rank has memory for.
    pub(super) pages: u64,
    /// Prefill tokens of a step that every rank has memory for.
    pub(super) prefill_tokens: u32,
}

/// Bytes in which ranks may differ.
const OWN_BYTES: usize = 1 + size_of::<u64>() + size_of::<u32>();

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
        bytes.push(u8::from(self.can_roll_back));
        bytes.extend(self.pages.to_le_bytes());
        bytes.extend(self.prefill_tokens.to_le_bytes());
        bytes
    }

    /// Exchanges handshakes and returns what all ranks can do.
    pub(super) fn exchange(
        self,
        group: &dyn Group,
        deadline: Deadline,
    ) -> Result<Agreed, GroupError> {
        let mine = self.encode();
        let (same, _) = mine.split_at(mine.len() - OWN_BYTES);
        let Self { can_roll_back, pages, prefill_tokens, .. } = self;
        let mut agreed = Agreed { can_roll_back, pages, prefill_tokens };
        for (rank, bytes) in group.all_gather(&mine, deadline)?.iter().enumerate() {
            let theirs = bytes.split_at_checked(same.len()).filter(|(it, _)| *it == same);
            let own = theirs.and_then(|(_, own)| own.split_first());
            let own = own.and_then(|(can_roll_back, rest)| {
                let (pages, prefill) = rest.split_first_chunk()?;
                Some((*can_roll_back, *pages, prefill.try_into().ok()?))
            });
            let Some((can_roll_back @ 0..=1, pages, prefill)) = own else {
                return Err(GroupError::OutOfStep {
                    rank: rank as u32,
                    expected: format!(
                        "a handshake of {} bytes with KV type {:?} (--kv-type)",
                        mine.len(),
                        self.kv
                    ),
                    found: format!("{bytes:?}"),
                });
            };
            agreed.can_roll_back &= can_roll_back == 1;
            agreed.pages = agreed.pages.min(u64::from_le_bytes(pages));
            agreed.prefill_tokens = agreed.prefill_tokens.min(u32::from_le_bytes(prefill));
        }
        Ok(agreed)
    }
}
