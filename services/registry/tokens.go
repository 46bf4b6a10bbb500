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

// tokenConfig configures how the registry issues service account tokens.
type tokenConfig struct {
	// issuer signs tokens. Nil: no tokens are issued.
	issuer serviceaccount.TokenGenerator
	// maxExpiration is the longest validity that a request may set; 0: no limit. extendedExpiration is the validity of
	// tokens with extended expiration, for clients that do not reload their token.
	maxExpiration, extendedExpiration time.Duration
}

const (
	// keySyncTimeout bounds the key sync with an external signer, and signerTimeout the read of its metadata, as in
	// kube-apiserver.
	keySyncTimeout = time.Minute
	signerTimeout  = 10 * time.Second
)

// tokenConfig follows completeServiceAccountOptions in k8s.io/kubernetes/pkg/controlplane/apiserver/options. The
// connection to an external signer (KEP-740) ends with ctx.
func (c *Config) tokenConfig(ctx context.Context) (*tokenConfig, error) {
	t := &tokenConfig{
		maxExpiration:      c.MaxTokenExpiration,
		extendedExpiration: serviceaccount.ExpirationExtensionSeconds * time.Second,
	}
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
				"--service-account-signing-key-file and --service-account-signing-endpoint are mutually exclusive: " +
					"set only one of them",
			)
		}
		return t, t.useExternalSigner(ctx, issuer, c.ServiceAccountSigningEndpoint)
	}
	key, err := keyutil.PrivateKeyFromFile(c.ServiceAccountSigningKeyFile)
	if err != nil {
		return nil, fmt.Errorf("--service-account-signing-key-file %q: %w", c.ServiceAccountSigningKeyFile, err)
	}
	t.issuer, err = serviceaccount.JWTTokenGenerator(issuer, key)
	return t, err
}

// useExternalSigner issues tokens with the signer at a socket. It limits their validity to the signer's maximum.
func (t *tokenConfig) useExternalSigner(ctx context.Context, issuer, endpoint string) error {
	signer, _, err := plugin.New(ctx, issuer, endpoint, keySyncTimeout, false)
	if err != nil {
		return fmt.Errorf(
			"--service-account-signing-endpoint %q: while setting up external-jwt-signer: %w",
			endpoint,
			err,
		)
	}
	metadataCtx, cancel := context.WithTimeout(ctx, signerTimeout)
	defer cancel()
	metadata, err := signer.GetServiceMetadata(metadataCtx)
	if err != nil {
		return fmt.Errorf(
			"--service-account-signing-endpoint %q: while setting up external-jwt-signer: %w",
			endpoint,
			err,
		)
	}
	if metadata.MaxTokenExpirationSeconds < validation.MinTokenAgeSec {
		return fmt.Errorf(
			"--service-account-signing-endpoint %q: max token life supported by external-jwt-signer (%ds) "+
				"is less than acceptable (min %ds)",
			endpoint,
			metadata.MaxTokenExpirationSeconds,
			validation.MinTokenAgeSec,
		)
	}
	maxExpiration := time.Duration(metadata.MaxTokenExpirationSeconds) * time.Second
	if t.maxExpiration > maxExpiration {
		return fmt.Errorf("--service-account-max-token-expiration %s: --service-account-signing-endpoint supports %s "+
			"at most; take that or less", t.maxExpiration, maxExpiration)
	}
	if t.maxExpiration == 0 {
		t.maxExpiration = maxExpiration
	}
	t.issuer, t.extendedExpiration = signer, min(maxExpiration, t.extendedExpiration)
	return nil
}
