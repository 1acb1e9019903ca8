//! `strftime` for templates that state the date, in UTC: the standard library knows no time zone,
//! and ranks and reruns should not differ by where they stand.

use std::{
    fmt::Write,
    time::{SystemTime, UNIX_EPOCH},
};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] =
    ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];

/// A moment in the proleptic Gregorian calendar.
struct Moment {
    year: i64,
    /// 1 to 12.
    month: u32,
    /// 1 to 31.
    day: u32,
    /// 0 is Monday.
    weekday: usize,
    /// 1 to 366.
    yearday: u32,
    /// Seconds since midnight.
    second: u32,
}

/// Formats a moment as Python's `strftime` in the C locale; the error is the directive that is not
/// known.
pub(super) fn strftime(now: SystemTime, format: &str) -> Result<String, String> {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let moment = Moment::from_unix(seconds);
    let mut out = String::new();
    moment.write(&mut out, format)?;
    Ok(out)
}

impl Moment {
    /// Days to dates after Howard Hinnant, `chrono`-compatible low-level date algorithms.
    fn from_unix(seconds: u64) -> Self {
        let days = (seconds / 86_400) as i64;
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let day_of_era = shifted.rem_euclid(146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let march_day = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let march_month = (5 * march_day + 2) / 153;
        let month = if march_month < 10 { march_month + 3 } else { march_month - 9 } as u32;
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let day = (march_day - (153 * march_month + 2) / 5 + 1) as u32;
        let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][month as usize - 1];
        let yearday = before + day + u32::from(leap && month > 2);
        let weekday = (days + 3).rem_euclid(7) as usize;
        Self { year, month, day, weekday, yearday, second: (seconds % 86_400) as u32 }
    }

    fn write(&self, out: &mut String, format: &str) -> Result<(), String> {
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let mut directive = chars.next().ok_or("%")?;
            // glibc's and Apple's sign for numbers without padding.
            let bare = directive == '-';
            if bare {
                directive = chars.next().ok_or("%-")?;
            }
            self.write_directive(out, directive, bare)?;
        }
        Ok(())
    }

    fn write_directive(&self, out: &mut String, directive: char, bare: bool) -> Result<(), String> {
        let hour = self.second / 3600;
        let (number, width) = match directive {
            'd' => (self.day, 2),
            'H' => (hour, 2),
            'I' => ((hour + 11) % 12 + 1, 2),
            'j' => (self.yearday, 3),
            'm' => (self.month, 2),
            'M' => (self.second / 60 % 60, 2),
            'S' => (self.second % 60, 2),
            'y' => (self.year.rem_euclid(100) as u32, 2),
            'w' => ((self.weekday as u32 + 1) % 7, 1),
            'u' => (self.weekday as u32 + 1, 1),
            _ => return self.write_word(out, directive),
        };
        let width = if bare { 1 } else { width };
        // Writing to a string cannot fail.
        let _ = write!(out, "{number:0width$}");
        Ok(())
    }

    fn write_word(&self, out: &mut String, directive: char) -> Result<(), String> {
        let month = MONTHS[self.month as usize - 1];
        let day = DAYS[self.weekday];
        match directive {
            'a' => out.push_str(&day[..3]),
            'A' => out.push_str(day),
            'b' | 'h' => out.push_str(&month[..3]),
            'B' => out.push_str(month),
            'e' => {
                let _ = write!(out, "{:2}", self.day);
            }
            'Y' => {
                let _ = write!(out, "{}", self.year);
            }
            'p' => out.push_str(if self.second < 43_200 { "AM" } else { "PM" }),
            'Z' => out.push_str("UTC"),
            'z' => out.push_str("+0000"),
            'F' => self.write(out, "%Y-%m-%d")?,
            'D' | 'x' => self.write(out, "%m/%d/%y")?,
            'T' | 'X' => self.write(out, "%H:%M:%S")?,
            'R' => self.write(out, "%H:%M")?,
            'c' => self.write(out, "%a %b %e %T %Y")?,
            'n' => out.push('\n'),
            't' => out.push('\t'),
            '%' => out.push('%'),
            other => return Err(format!("%{other}")),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn check(seconds: u64, format: &str, expected: &str) {
        let now = UNIX_EPOCH + Duration::from_secs(seconds);
        assert_eq!(strftime(now, format).as_deref(), Ok(expected), "{seconds} {format}");
    }

    #[test]
    fn dates_read_as_in_python() {
        check(0, "%A %d %B %Y %H:%M:%S %j %p %I", "Thursday 01 January 1970 00:00:00 001 AM 12");
        check(951_782_400, "%F %a %j %y", "2000-02-29 Tue 060 00");
        check(1_735_689_599, "%d %b %Y %T %j %I %p", "31 Dec 2024 23:59:59 366 11 PM");
        check(1_767_571_200, "%-d %e %-m %% %Z%z %w %u", "5  5 1 % UTC+0000 1 1");
        check(1_792_281_600, "%c|%D|%R", "Sun Oct 18 00:00:00 2026|10/18/26|00:00");
    }

    #[test]
    fn unknown_directives_are_named() {
        assert_eq!(strftime(UNIX_EPOCH, "%Y %Q"), Err("%Q".to_owned()));
        assert_eq!(strftime(UNIX_EPOCH, "%"), Err("%".to_owned()));
    }
}
