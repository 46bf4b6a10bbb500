package watchfanout

import (
	"errors"
	"time"

	"github.com/spf13/pflag"

	"watershed.dev/platform/config"
	"watershed.dev/platform/eventlog"
)

// Config is the configuration of a replica.
type Config struct {
	Log            eventlog.Options
	RingBytes      int
	ProgressPeriod time.Duration
	// IdleTimeout is how long a resource without readers stays in memory; 0 is forever.
	IdleTimeout time.Duration
	// CompressedBytes bounds the cached compressed runs of lists, in bytes; 0 disables compression in the replica.
	CompressedBytes int
}

// NewConfig returns an empty configuration; AddFlags sets the defaults.
func NewConfig() *Config { return &Config{} }

// AddFlags adds every option to fs.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	c.Log.AddFlags(fs)
	fs.IntVar(&c.RingBytes, "watch-ring-bytes", 32<<20,
		"Bytes of recent events cached for each resource. Above a sixteenth of it, events older than 10 minutes "+
			"are dropped.")
	fs.IntVar(&c.CompressedBytes, "compressed-lists-bytes", 64<<20,
		"Bytes of compressed lists cached for clients that accept gzip: unchanged parts are compressed only "+
			"once. 0: the gateways compress each list.")
	fs.DurationVar(&c.IdleTimeout, "cache-idle-timeout", 10*time.Minute,
		"How long the objects of a resource without lists or watches stay in memory; the next list or watch "+
			"reads them again. 0: forever.")
	fs.DurationVar(&c.ProgressPeriod, "watch-progress-period", 2*time.Second,
		"How often a replica sends its revision on a stream: the gateways' source of bookmarks. Up to ten times as "+
			"long for watches that share a call or a replica with many others.")
}

// Validate returns an error that names the invalid flag.
func (c *Config) Validate() error {
	return errors.Join(
		c.Log.Validate(),
		config.AtLeast("watch-ring-bytes", c.RingBytes, 1),
		config.AtLeast("compressed-lists-bytes", c.CompressedBytes, 0),
		config.AtLeast("cache-idle-timeout", c.IdleTimeout, 0),
		config.AtLeast("watch-progress-period", c.ProgressPeriod, time.Millisecond),
	)
}
