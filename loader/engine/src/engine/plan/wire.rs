//! A plan's bytes. All numbers little-endian; a list is its length (4) and its entries. Followers
//! parse them as foreign bytes.
//!
//! | bytes | field |
//! |---|---|
//! | 8 | number of the step in its epoch, from 1 |
//! | list of 20 | pages that enter the prefix cache: request (8), index (4), page (8) |
//! | list of 8 | sequences that ended: request |
//! | list of 8 | pages that the prefix cache evicted |
//! | list | new sequences: request (8), total (4), sampling parameters, pages (list of 8), history (list of 4) |
//! | list | scheduled sequences: request (8), position (4), flags (1: a token is sampled, 2: masks follow, 4: the prompt's next token follows), drafts among the tokens (4), tokens (list of 4), next token (4), masks |
//!
//! Sampling parameters: temperature, `top_k`, `top_p`, `min_p`, repetition, presence and frequency penalty (4
//! each), seed (8), biases (list of 8: token, bias), reported alternatives (1; 255: none), what is wanted
//! of the prompt (1; 255: nothing, 254: its embedding, else log probabilities with so many
//! alternatives), length of the prompt (4), forbidden tokens (list of 4) and the length before which they are (4).
//! Masks, one more than there are drafts: form (1: 0 allows everything, 2: bits follow, 4: a list of
//! allowed tokens follows), then, unless everything is allowed, size of the vocabulary (4) and the
//! words or the tokens (list of 4).

use shardpack_engine_api::{MAX_LOGPROBS, PromptOutput, RequestId, Sampling, TokenId, TokenMask};

use super::{
    super::{draft::MAX_STEP_DRAFTS, sample::SamplingParams},
    MAX_PREFILL_TOKENS, MAX_SEQUENCES, NewSequence, PageId, Plan, Publish, ScheduledSequence,
};

/// Entries of the lists of sequences. Those that ended may be as many as those that replaced
/// them.
const MAX_ENTRIES: usize = 2 * MAX_SEQUENCES;

/// Tokens of one step: a prompt's part, one for each sequence that is decoding, and drafts.
const MAX_TOKENS: usize = MAX_PREFILL_TOKENS + MAX_SEQUENCES + MAX_STEP_DRAFTS;

/// Tokens of one sequence, and pages of all: longer than any context in use.
const MAX_LEN: usize = 1 << 24;

/// Tokens of a vocabulary.
const MAX_VOCAB: u32 = 1 << 24;

/// Marks that no alternatives are reported.
const NO_LOGPROBS: u8 = u8::MAX;

/// Marks that an embedding is wanted of the prompt.
const EMBEDDING: u8 = u8::MAX - 1;

/// Bytes that are no plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::engine) enum PlanError {
    #[error("a plan that ends early")]
    Short,
    #[error("a plan with bytes after its end")]
    Long,
    #[error("a plan beyond its limits")]
    Limit,
    #[error("a plan with a field out of range")]
    Field,
}

impl Plan {
    /// # Panics
    /// When the plan exceeds the limits that [`Plan::parse`] checks.
    pub(in crate::engine) fn encode(&self) -> Vec<u8> {
        let tokens: usize = self.scheduled.iter().map(|scheduled| scheduled.tokens.len()).sum();
        assert!(tokens <= MAX_TOKENS, "{tokens} tokens in a plan");
        let mut out = Writer(self.step.to_le_bytes().to_vec());
        out.list(&self.publish, MAX_LEN, |out, publish| {
            out.u64(publish.id.0);
            out.u32(publish.index);
            out.u64(publish.page.0);
        });
        out.list(&self.end, MAX_ENTRIES, |out, id| out.u64(id.0));
        out.list(&self.drop, MAX_LEN, |out, page| out.u64(page.0));
        out.list(&self.begin, MAX_ENTRIES, |out, begin| {
            out.u64(begin.id.0);
            out.u32(begin.total);
            out.params(&begin.params);
            out.list(&begin.pages, MAX_LEN, |out, page| out.u64(page.0));
            out.list(&begin.history, MAX_LEN, |out, token| out.u32(*token));
        });
        out.list(&self.scheduled, MAX_ENTRIES, Writer::scheduled);
        out.0
    }

    /// Every value returned is within the limits; whether it fits the sequences is the runner's
    /// to check.
    pub(in crate::engine) fn parse(bytes: &[u8]) -> Result<Self, PlanError> {
        let mut rest = Reader { bytes, tokens_left: MAX_TOKENS };
        let plan = Self {
            step: rest.u64()?,
            publish: rest.list(MAX_LEN, |rest| {
                let id = RequestId(rest.u64()?);
                Ok(Publish { id, index: rest.u32()?, page: PageId(rest.u64()?) })
            })?,
            end: rest.list(MAX_ENTRIES, |rest| rest.u64().map(RequestId))?,
            drop: rest.list(MAX_LEN, |rest| rest.u64().map(PageId))?,
            begin: rest.list(MAX_ENTRIES, |rest| {
                Ok(NewSequence {
                    id: RequestId(rest.u64()?),
                    total: rest.u32()?,
                    params: rest.params()?,
                    pages: rest.list(MAX_LEN, |rest| rest.u64().map(PageId))?,
                    history: rest.list(MAX_LEN, Reader::u32)?,
                })
            })?,
            scheduled: rest.list(MAX_ENTRIES, Reader::scheduled)?,
        };
        if rest.bytes.is_empty() { Ok(plan) } else { Err(PlanError::Long) }
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    fn f32(&mut self, value: f32) {
        self.u32(value.to_bits());
    }

    fn list<T>(&mut self, entries: &[T], limit: usize, write: impl Fn(&mut Self, &T)) {
        assert!(entries.len() <= limit, "{} entries in a list of a plan", entries.len());
        self.u32(entries.len() as u32);
        for entry in entries {
            write(self, entry);
        }
    }

    fn params(&mut self, params: &SamplingParams) {
        let sampling = &params.sampling;
        self.f32(sampling.temperature);
        self.u32(sampling.top_k);
        self.f32(sampling.top_p);
        self.f32(sampling.min_p);
        self.f32(sampling.repetition_penalty);
        self.f32(sampling.presence_penalty);
        self.f32(sampling.frequency_penalty);
        self.u64(sampling.seed);
        self.list(&sampling.logit_bias, MAX_LEN, |out, (token, bias)| {
            out.u32(token.0);
            out.f32(*bias);
        });
        self.0.push(params.logprobs.map_or(NO_LOGPROBS, |count| count as u8));
        self.0.push(match params.prompt_output {
            PromptOutput::Nothing => NO_LOGPROBS,
            PromptOutput::Embedding => EMBEDDING,
            PromptOutput::Logprobs(count) => count as u8,
        });
        self.u32(params.prompt_len);
        self.list(&params.forbidden, MAX_LEN, |out, token| out.u32(*token));
        self.u32(params.forbidden_before);
    }

    fn scheduled(&mut self, scheduled: &ScheduledSequence) {
        let places = [0, scheduled.drafts as usize + 1];
        assert!(places.contains(&scheduled.masks.len()), "{} masks", scheduled.masks.len());
        self.u64(scheduled.id.0);
        self.u32(scheduled.position);
        let flags = [scheduled.sample, !scheduled.masks.is_empty(), scheduled.next.is_some()];
        self.0.push((0..).zip(flags).map(|(bit, flag)| u8::from(flag) << bit).sum());
        self.u32(scheduled.drafts);
        self.list(&scheduled.tokens, MAX_TOKENS, |out, token| out.u32(*token));
        if let Some(next) = scheduled.next {
            self.u32(next);
        }
        scheduled.masks.iter().for_each(|mask| self.mask(mask.as_ref()));
    }

    fn mask(&mut self, mask: Option<&TokenMask>) {
        let Some(mask) = mask else { return self.0.push(0) };
        // Whichever is shorter: few tokens are allowed in most places of a grammar.
        let is_listed = (mask.count() as usize) < mask.words().len();
        self.0.push(if is_listed { 4 } else { 2 });
        self.u32(mask.vocab_size());
        if is_listed {
            let allowed: Vec<u32> = allowed(mask).collect();
            self.list(&allowed, MAX_LEN, |out, token| out.u32(*token));
        } else {
            self.list(mask.words(), MAX_LEN, |out, word| out.u32(*word));
        }
    }
}

fn allowed(mask: &TokenMask) -> impl Iterator<Item = u32> {
    let bits = |word: u32| (0..32).filter(move |bit| word >> bit & 1 == 1);
    let words = mask.words().iter().enumerate();
    words.flat_map(move |(index, word)| bits(*word).map(move |bit| index as u32 * 32 + bit))
}

struct Reader<'a> {
    bytes: &'a [u8],
    /// Tokens of scheduled sequences that may still come.
    tokens_left: usize,
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], PlanError> {
        let (taken, rest) = self.bytes.split_first_chunk().ok_or(PlanError::Short)?;
        self.bytes = rest;
        Ok(*taken)
    }

    fn u8(&mut self) -> Result<u8, PlanError> {
        self.take().map(|[byte]: [u8; 1]| byte)
    }

    fn u32(&mut self) -> Result<u32, PlanError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, PlanError> {
        self.take().map(u64::from_le_bytes)
    }

    /// A finite float in a range.
    fn f32(&mut self, least: f32, most: f32) -> Result<f32, PlanError> {
        let value = f32::from_bits(self.u32()?);
        (value >= least && value <= most).then_some(value).ok_or(PlanError::Field)
    }

    fn list<T>(
        &mut self,
        limit: usize,
        mut read: impl FnMut(&mut Self) -> Result<T, PlanError>,
    ) -> Result<Vec<T>, PlanError> {
        let count = self.u32()? as usize;
        if count > limit {
            return Err(PlanError::Limit);
        }
        // Grown as entries come: an announced length alone takes no memory.
        let mut entries = Vec::new();
        for _ in 0..count {
            entries.push(read(self)?);
        }
        Ok(entries)
    }

    fn params(&mut self) -> Result<SamplingParams, PlanError> {
        let sampling = Sampling {
            temperature: self.f32(0.0, f32::MAX)?,
            top_k: self.u32()?,
            top_p: self.f32(0.0, 1.0)?,
            min_p: self.f32(0.0, 1.0)?,
            repetition_penalty: self.f32(f32::MIN_POSITIVE, f32::MAX)?,
            presence_penalty: self.f32(f32::MIN, f32::MAX)?,
            frequency_penalty: self.f32(f32::MIN, f32::MAX)?,
            seed: self.u64()?,
            logit_bias: self
                .list(MAX_LEN, |rest| Ok((TokenId(rest.u32()?), rest.f32(f32::MIN, f32::MAX)?)))?,
        };
        let logprobs = match self.u8()? {
            NO_LOGPROBS => None,
            count => Some(alternatives(count)?),
        };
        let prompt_output = match self.u8()? {
            NO_LOGPROBS => PromptOutput::Nothing,
            EMBEDDING => PromptOutput::Embedding,
            count => PromptOutput::Logprobs(alternatives(count)?),
        };
        Ok(SamplingParams {
            sampling,
            logprobs,
            prompt_output,
            prompt_len: self.u32()?,
            forbidden: self.list(MAX_LEN, Self::u32)?,
            forbidden_before: self.u32()?,
        })
    }

    fn scheduled(&mut self) -> Result<ScheduledSequence, PlanError> {
        let (id, position) = (RequestId(self.u64()?), self.u32()?);
        let flags = self.u8()?;
        let drafts = self.u32()?;
        let tokens = self.list(self.tokens_left, Self::u32)?;
        self.tokens_left -= tokens.len();
        let (sample, has_masks) = (flags & 1 == 1, flags & 2 == 2);
        // A draft follows a token that is certain, and is compared with what is sampled.
        let fits = (drafts as usize) < tokens.len() && (sample || (drafts == 0 && !has_masks));
        if !fits || flags > 7 {
            return Err(PlanError::Field);
        }
        let next = if flags & 4 == 4 { Some(self.u32()?) } else { None };
        let masks = if has_masks { drafts + 1 } else { 0 };
        let masks = (0..masks).map(|_| self.mask()).collect::<Result<_, _>>()?;
        Ok(ScheduledSequence { id, position, tokens, drafts, sample, next, masks })
    }

    fn mask(&mut self) -> Result<Option<TokenMask>, PlanError> {
        match self.u8()? {
            0 => Ok(None),
            2 => {
                let vocab = self.vocab()?;
                let words = self.list(vocab.div_ceil(32) as usize, Self::u32)?;
                TokenMask::from_words(vocab, words).ok_or(PlanError::Field).map(Some)
            }
            4 => {
                let mut mask = TokenMask::none(self.vocab()?);
                for token in self.list(MAX_LEN, Self::u32)? {
                    mask.allow(TokenId(token));
                }
                Ok(Some(mask))
            }
            _ => Err(PlanError::Field),
        }
    }

    fn vocab(&mut self) -> Result<u32, PlanError> {
        let vocab = self.u32()?;
        if vocab <= MAX_VOCAB { Ok(vocab) } else { Err(PlanError::Limit) }
    }
}

/// Alternatives that may be reported with a token.
fn alternatives(count: u8) -> Result<u32, PlanError> {
    let count = u32::from(count);
    if count <= MAX_LOGPROBS { Ok(count) } else { Err(PlanError::Field) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        let mut few = TokenMask::none(100);
        few.allow(TokenId(99));
        let mut many = TokenMask::all(100);
        many.forbid(TokenId(3));
        let scheduled =
            |id, position, tokens: &[u32], sample, masks: &[Option<TokenMask>]| ScheduledSequence {
                id: RequestId(id),
                position,
                tokens: tokens.to_vec(),
                drafts: masks.len().saturating_sub(1) as u32,
                sample,
                next: (!sample).then_some(8),
                masks: masks.to_vec(),
            };
        let sampling = Sampling {
            temperature: 0.7,
            top_k: 40,
            top_p: 0.9,
            min_p: 0.05,
            repetition_penalty: 1.1,
            presence_penalty: -0.5,
            frequency_penalty: 0.25,
            logit_bias: vec![(TokenId(4), -100.0)],
            seed: 9,
        };
        let params = SamplingParams {
            sampling,
            logprobs: Some(3),
            prompt_output: PromptOutput::Logprobs(2),
            prompt_len: 7,
            forbidden: vec![2],
            forbidden_before: 9,
        };
        let (id, pages) = (RequestId(3), vec![PageId(8)]);
        Plan {
            step: 7,
            publish: vec![Publish { id: RequestId(1), index: 4, page: PageId(11) }],
            end: vec![RequestId(1), RequestId(u64::MAX)],
            drop: vec![PageId(5)],
            begin: vec![NewSequence { id, total: 600, params, pages, history: vec![1, 2] }],
            scheduled: vec![
                scheduled(3, 0, &[5, 6, 7], false, &[]),
                scheduled(2, 40, &[511], true, &[Some(few.clone())]),
                scheduled(4, 40, &[511, 3, 4], true, &[Some(many), None, Some(few)]),
                ScheduledSequence { drafts: 2, ..scheduled(5, 9, &[8, 3, 4], true, &[]) },
            ],
        }
    }

    #[test]
    fn a_plan_survives_its_bytes() {
        for plan in [plan(), Plan::default()] {
            assert_eq!(Plan::parse(&plan.encode()), Ok(plan));
        }
    }

    #[test]
    fn every_other_length_is_refused() {
        let bytes = plan().encode();
        for len in 0..bytes.len() {
            assert_eq!(Plan::parse(&bytes[..len]), Err(PlanError::Short), "{len} bytes");
        }
        let mut longer = bytes;
        longer.push(0);
        assert_eq!(Plan::parse(&longer), Err(PlanError::Long));
    }

    #[test]
    fn impossible_fields_are_refused() {
        let check = |change: fn(&mut Plan)| {
            let mut plan = plan();
            change(&mut plan);
            assert_eq!(Plan::parse(&plan.encode()), Err(PlanError::Field));
        };
        check(|plan| plan.begin[0].params.sampling.temperature = f32::NAN);
        check(|plan| plan.begin[0].params.sampling.temperature = -1.0);
        check(|plan| plan.begin[0].params.sampling.top_p = 1.5);
        check(|plan| plan.begin[0].params.sampling.min_p = -0.1);
        check(|plan| plan.begin[0].params.sampling.repetition_penalty = 0.0);
        check(|plan| plan.begin[0].params.sampling.logit_bias[0].1 = f32::INFINITY);
        check(|plan| plan.begin[0].params.logprobs = Some(21));
        check(|plan| plan.begin[0].params.prompt_output = PromptOutput::Logprobs(21));
        check(|plan| plan.scheduled[0].tokens.clear());
        check(|plan| plan.scheduled[1].sample = false);
        check(|plan| plan.scheduled[3].sample = false);
        check(|plan| plan.scheduled[3].drafts = 3);
        // More entries are announced than a list may have.
        let mut bytes = plan().encode();
        bytes[8..12].fill(0xff);
        assert_eq!(Plan::parse(&bytes), Err(PlanError::Limit));
    }

    #[test]
    fn changed_bytes_never_panic() {
        let bytes = plan().encode();
        for at in 0..bytes.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut changed = bytes.clone();
                changed[at] = value;
                let _ = Plan::parse(&changed);
            }
        }
    }
}
