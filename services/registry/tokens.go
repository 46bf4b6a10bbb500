package registry

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/client-go/util/keyutil"
	"k8s.io/kubernetes/pkg/apis/authentication/validation"
	"k8s.io/kubernetes/pkg/serviceaccount"
	"k8s.io/kubernetes/pkg/serviceaccount/externaljwt/plugin"
)

// tokens is how service accounts' tokens are issued.
type tokens struct {
	// issuer signs; nil: no tokens are issued.
	issuer serviceaccount.TokenGenerator
	// longest is the validity that may be asked for; 0: any. extended is the longest that a token of an old client is
	// given.
	longest, extended time.Duration
}

const (
	// keySync bounds how long an external signer may take to tell its keys, and signerTimeout what it is: as in
	// kube-apiserver.
	keySync       = time.Minute
	signerTimeout = 10 * time.Second
)

// tokens follows k8s.io/kubernetes/pkg/controlplane/apiserver/options, completeServiceAccountOptions. An external
// signer is asked for as long as ctx is not done (KEP-740).
func (c *Config) tokens(ctx context.Context) (*tokens, error) {
	t := &tokens{longest: c.MaxTokenExpiration, extended: serviceaccount.ExpirationExtensionSeconds * time.Second}
	if d := c.MaxTokenExpiration; d != 0 && (d < time.Hour || d > time.Duration(1<<32)*time.Second) {
		return nil, fmt.Errorf(
			"--service-account-max-token-expiration %s: want between 1 hour and 2^32 seconds",
			d,
		)
	}
	if c.ServiceAccountSigningKeyFile == "" && c.ServiceAccountSigningEndpoint == "" {
		return t, nil
	}
	if len(c.ServiceAccountIssuers) == 0 {
		return nil, errors.New("--service-account-issuer must be set with --service-account-signing-key-file and " +
			"--service-account-signing-endpoint")
	}
	issuer := c.ServiceAccountIssuers[0]
	if c.ServiceAccountSigningEndpoint != "" {
		if c.ServiceAccountSigningKeyFile != "" {
			return nil, errors.New(
				"--service-account-signing-key-file and --service-account-signing-endpoint cannot both " +
					"be given: either the key signs or the signer; leave one out",
			)
		}
		return t, t.external(ctx, issuer, c.ServiceAccountSigningEndpoint)
	}
	key, err := keyutil.PrivateKeyFromFile(c.ServiceAccountSigningKeyFile)
	if err != nil {
		return nil, fmt.Errorf("--service-account-signing-key-file %q: %w", c.ServiceAccountSigningKeyFile, err)
	}
	t.issuer, err = serviceaccount.JWTTokenGenerator(issuer, key)
	return t, err
}

// external has the signer at a socket issue, for no longer than it does.
func (t *tokens) external(ctx context.Context, issuer, endpoint string) error {
	signer, _, err := plugin.New(ctx, issuer, endpoint, keySync, false)
	if err != nil {
		return fmt.Errorf(
			"--service-account-signing-endpoint %q: while setting up external-jwt-signer: %w",
			endpoint,
			err,
		)
	}
	timed, cancel := context.WithTimeout(ctx, signerTimeout)
	defer cancel()
	about, err := signer.GetServiceMetadata(timed)
	if err != nil {
		return fmt.Errorf(
			"--service-account-signing-endpoint %q: while setting up external-jwt-signer: %w",
			endpoint,
			err,
		)
	}
	if about.MaxTokenExpirationSeconds < validation.MinTokenAgeSec {
		return fmt.Errorf(
			"--service-account-signing-endpoint %q: max token life supported by external-jwt-signer (%ds) "+
				"is less than acceptable (min %ds)",
			endpoint,
			about.MaxTokenExpirationSeconds,
			validation.MinTokenAgeSec,
		)
	}
	longest := time.Duration(about.MaxTokenExpirationSeconds) * time.Second
	if t.longest > longest {
		return fmt.Errorf("--service-account-max-token-expiration %s: --service-account-signing-endpoint supports %s "+
			"at most; take that or less", t.longest, longest)
	}
	if t.longest == 0 {
		t.longest = longest
	}
	t.issuer, t.extended = signer, min(longest, t.extended)
	return nil
}
