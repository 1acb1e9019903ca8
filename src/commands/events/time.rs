//! Moments as the log writes them: `2026-11-27T05:32:40.123Z`.

use std::time::{SystemTime, UNIX_EPOCH};

use shardpack_identity::date;

const DAY_SECONDS: u64 = 24 * 60 * 60;

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

/// A moment in milliseconds since 1970, in UTC.
pub(crate) fn rfc3339(ms: u64) -> String {
    let (seconds, ms) = (ms / 1000, ms % 1000);
    let (day, second) = (date(seconds), seconds % DAY_SECONDS);
    let (hours, minutes) = (second / 3600, second / 60 % 60);
    format!("{day}T{hours:02}:{minutes:02}:{:02}.{ms:03}Z", second % 60)
}

/// The reverse; `None` of anything else.
pub(crate) fn parse(text: &str) -> Option<u64> {
    let number = |from: usize, to: usize| text.get(from..to)?.parse::<u64>().ok();
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    if !(1970..=9999).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    let (hours, minutes, seconds) = (number(11, 13)?, number(14, 16)?, number(17, 19)?);
    let ms = number(20, 23)?;
    let of_day = hours * 3600 + minutes * 60 + seconds;
    // The reverse of `date`: years begin in March.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = year * 365 + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1;
    let moment = ((days - 719_468) * DAY_SECONDS + of_day) * 1000 + ms;
    (rfc3339(moment) == text).then_some(moment)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_the_same_there_and_back() {
        for (ms, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399_999, "2000-02-28T23:59:59.999Z"),
            (951_868_800_001, "2000-03-01T00:00:00.001Z"),
            (1_795_757_560_123, "2026-11-27T05:32:40.123Z"),
        ] {
            assert_eq!(rfc3339(ms), text);
            assert_eq!(parse(text), Some(ms));
        }
        for ms in (0..4_000_000_000_000).step_by(86_399_999_977) {
            assert_eq!(parse(&rfc3339(ms)), Some(ms));
        }
        for bad in ["", "2026-11-27", "2026-02-30T00:00:00.000Z", "2026-11-27T25:00:00.000Z", "é"]
        {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
