package apiclient

import (
	"time"

	"github.com/spf13/pflag"
)

// Freshness bounds the age of the policy by which a service decides.
type Freshness struct {
	// Bound is the age above which the service decides nothing; 0: no bound.
	Bound time.Duration
}

// AddFlags adds --policy-freshness-bound.
func (f *Freshness) AddFlags(fs *pflag.FlagSet) {
	fs.DurationVar(&f.Bound, "policy-freshness-bound", 10*time.Second,
		"The maximum age of the cluster's policy by which this service decides. Above it, requests that need the "+
			"policy are rejected with 503 until the service has caught up. 0: no bound.")
}
