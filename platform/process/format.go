package process

import (
	"fmt"
	"time"
)

// FormatP99 returns a 99th percentile, which is the bound of a bucket. 0 means that it is unknown.
func FormatP99(seconds float64) string {
	switch {
	case seconds == 0:
		return "-"
	case seconds < .01:
		return fmt.Sprintf("≤ %.2g ms", seconds*1e3)
	case seconds < 1:
		return fmt.Sprintf("≤ %.0f ms", seconds*1e3)
	}
	return fmt.Sprintf("≤ %.1f s", seconds)
}

// FormatAge returns a duration in seconds, minutes, hours or days.
func FormatAge(d time.Duration) string {
	switch {
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", int(d.Hours()))
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}
