//! Times as text: RFC 3339, in UTC.

use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds of a day.
pub(super) const DAY_SECONDS: u64 = 86_400;

/// A time as RFC 3339 has it, in UTC.
pub(super) fn rfc3339(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, seconds) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    // Days to a date of the Gregorian calendar, whose eras have 146,097 days (Howard Hinnant,
    // "chrono-compatible low-level date algorithms").
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let millis = since.subsec_millis();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}Z")
}

/// Seconds since 1970 of a time in UTC: `2026-11-27`, `2026-11-27T14:00:00Z` (seconds and their fraction
/// may be absent), or the seconds themselves.
pub(super) fn parse(text: &str) -> Option<u64> {
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text.parse().ok();
    }
    let (date, time) = match text.split_once(['T', 't', ' ']) {
        Some((date, time)) => (date, Some(time.strip_suffix(['Z', 'z'])?)),
        None => (text, None),
    };
    let mut parts = date.split('-').map(|part| part.parse::<u64>().ok());
    let (year, month, day) = (parts.next()??, parts.next()??, parts.next()??);
    let is_date = (1970..=9999).contains(&year) && (1..=12).contains(&month) && day >= 1;
    if parts.next().is_some() || !is_date || day > month_days(year, month) {
        return None;
    }
    let years: u64 = (1970..year).map(|year| 365 + u64::from(is_leap(year))).sum();
    let months: u64 = (1..month).map(|month| month_days(year, month)).sum();
    let days = years + months + day - 1;
    Some(days * DAY_SECONDS + time.map_or(Some(0), seconds_of)?)
}

/// Seconds of `14:00:00.5`.
fn seconds_of(time: &str) -> Option<u64> {
    let whole = time.split_once('.').map_or(time, |(whole, _)| whole);
    let mut parts = whole.split(':').map(|part| part.parse::<u64>().ok());
    let (hours, minutes) = (parts.next()??, parts.next()??);
    let seconds = parts.next().unwrap_or(Some(0))?;
    let is_time = hours < 24 && minutes < 60 && seconds < 60 && parts.next().is_none();
    is_time.then_some(hours * 3600 + minutes * 60 + seconds)
}

const fn is_leap(year: u64) -> bool {
    year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400)
}

const fn month_days(year: u64, month: u64) -> u64 {
    match month {
        2 => 28 + is_leap(year) as u64,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_are_dates_and_dates_times() {
        let check = |seconds: u64, expected: &str| {
            assert_eq!(rfc3339(UNIX_EPOCH + Duration::from_secs(seconds)), expected);
            assert_eq!(parse(expected), Some(seconds), "{expected}");
        };
        check(0, "1970-01-01T00:00:00.000Z");
        check(951_782_400, "2000-02-29T00:00:00.000Z");
        check(1_798_761_599, "2026-12-31T23:59:59.000Z");
        assert_eq!(parse("2000-02-29"), Some(951_782_400));
        assert_eq!(parse("2000-02-29T01:00Z"), Some(951_786_000));
        assert_eq!(parse("951782400"), Some(951_782_400));
        for wrong in
            ["", "2001-02-29", "2000-13-01", "2000-02-29T01:00", "2000-01-01T24:00Z", "now"]
        {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
