package watch

import (
	"errors"
	"time"

	"github.com/spf13/pflag"

	"watershed.dev/platform/config"
)

// Config holds the settings of watches.
type Config struct {
	// BookmarkPeriod is the minimum time between two bookmarks of a watch that allows them.
	BookmarkPeriod time.Duration
	// WriteTimeout is how long a client may accept no pending byte before its watch ends.
	WriteTimeout time.Duration
	// BroadcastBytes limits the recent events that a broadcast holds for receivers that are behind.
	BroadcastBytes int
	// BroadcastTotalBytes limits the recent events of all broadcasts. The same limit applies separately to the buffered
	// frames of shared initial events. When that buffer is full, shared initial events proceed at the pace of their
	// slowest member.
	BroadcastTotalBytes int64
	// UserRate is how many tokens per second the watches of one user receive. An event costs a token, plus
	// a token per KiB of data. 0: no limit.
	UserRate int
	// Compression compresses the responses of watches that allow it (Request.Compress).
	Compression bool
}

// AddFlags registers the flags --watch-* and --max-watch-rate-per-user, with their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.DurationVar(&c.BookmarkPeriod, "watch-bookmark-period", time.Minute,
		"The minimum time between two bookmarks of a watch that allows them.")
	fs.DurationVar(&c.WriteTimeout, "watch-write-timeout", 30*time.Second,
		"How long a client may accept no pending byte of a watch before the gateway ends the watch.")
	fs.BoolVar(&c.Compression, "watch-compression", false,
		"Compress the responses of watches for clients that accept gzip, except CBOR. The gateway compresses an event "+
			"once for all equal watches of a user that are up to date. kube-apiserver 1.36 compresses no watch.")
	fs.IntVar(&c.UserRate, "max-watch-rate-per-user", 100000,
		"The rate limit, in events per second, for all watches of a user at a gateway. The burst is ten seconds' "+
			"worth. An event counts as one, plus one per KB. Events over the rate are delayed, and a watch that falls "+
			"too far behind is ended. 0: no limit. Nodes, system:masters and the service accounts of kube-system "+
			"have no limit.")
	fs.Int64Var(&c.BroadcastTotalBytes, "watch-broadcast-total-bytes", 256<<20,
		"The total size in bytes of the recent events that all watch broadcasts hold for clients that are behind.")
	fs.IntVar(&c.BroadcastBytes, "watch-broadcast-bytes", 4<<20,
		"The size in bytes of the recent events that a watch broadcast holds. A watch that falls further behind "+
			"continues with its own stream.")
}

// Validate returns an error that names the invalid flag.
func (c *Config) Validate() error {
	return errors.Join(
		config.AtLeast("watch-bookmark-period", c.BookmarkPeriod, time.Millisecond),
		config.AtLeast("watch-write-timeout", c.WriteTimeout, time.Millisecond),
		config.AtLeast("max-watch-rate-per-user", c.UserRate, 0),
		config.AtLeast("watch-broadcast-total-bytes", c.BroadcastTotalBytes, 1),
		config.AtLeast("watch-broadcast-bytes", c.BroadcastBytes, 1),
	)
}
